// A family with unusual features, which shows what a model may be. Its layers alternate between two widths.
// Parts that are no layers stand before, between and after them. It has no position embedding, and layers on
// three stages share one matrix.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "llmc/model/model.h"
#include "llmc/model/operations.h"

namespace llmc::strange {

inline constexpr std::int64_t tokens = 6, vocabulary = 37, narrow = 24, wide = 40, layers = 8;
inline constexpr Init normal{.stddev = 0.2};

inline ParamSpec table() {
    return {.name = "wte.weight",
            .shape = {vocabulary, narrow},
            .init = {.stddev = 0.5},
            .tensor_dim = 0,
            .row_multiple = vocabulary_multiple};
}

inline Part embedding_part() {
    Trace t("embedding", "", tokens);
    return t.finish(scatter(t, embedding(t, table(), std::nullopt)));
}

// 24 -> 40: attention, parallel to two products that widen the input. The output is normalised twice.
inline Part attention_layer(std::int64_t heads, std::int64_t head_size) {
    Trace t("attention {}", "h.{}", tokens, narrow);
    const int n = layernorm(t, "ln_1", t.input(), false);
    const int q =
        product(t, "attn.qkv", gather(t, n), {3, heads, head_size}, by_outputs(1, "heads"), true, normal);
    const int a =
        product(t, "attn.out", attention(t, "attn", q, {heads, heads}), {wide}, by_inputs(), false, normal);
    const int u = product(t, "skip.up", gather(t, t.input()), {12}, by_outputs(0, "channels"), false, normal);
    const int d = product(t, "skip.down", u, {wide}, by_inputs(), true, normal);
    const auto [sum, n2] = add_layernorm(t, "ln_2", scatter(t, d), scatter(t, a), true);
    return t.finish(add(t, sum, n2));
}

// 40 -> 24: an MLP and a second branch of two products. The first of the two may use a matrix that several
// layers share.
inline Part mlp_layer(bool is_shared) {
    Trace t("mlp {}", "h.{}", tokens, wide);
    const int n = gather(t, layernorm(t, "ln", t.input(), true));
    const int u =
        product_gelu(t, "mlp.up", n, {32}, by_outputs(0, "channels of the MLP"), !is_shared, normal);
    const int d = product(t, "mlp.down", u, {narrow}, by_inputs(), true, normal);
    const int s = product(t, "mix.up", n, {16}, by_outputs(0, "channels"), is_shared, normal,
                          is_shared ? "shared.weight" : "");
    return t.finish(
        add(t, scatter(t, d), scatter(t, product(t, "mix.down", s, {narrow}, by_inputs(), false, normal))));
}

// 24 -> 24, not a layer: for the places before, between and after the layers.
inline Part other_part(const char* name, const char* unit, std::int64_t channels) {
    Trace t(name, unit, tokens, narrow);
    const int n = layernorm(t, "ln", t.input(), true);
    const int u = product(t, "up", gather(t, n), {channels}, by_outputs(0, "channels"), true, normal);
    return t.finish(
        add(t, t.input(), scatter(t, product(t, "down", u, {narrow}, by_inputs(), true, normal))));
}

inline Part head_part() {
    Trace t("head", "", tokens, narrow);
    head_loss(t, gather(t, layernorm(t, "ln_f", t.input(), true)), table(), true);
    return t.finish();
}

// In a pipeline of four stages, the first, second and last have the shared matrix. In a pipeline of three,
// all have it.
inline Model model() {
    // Four alternating layers, then the same again. One layer of the second group has a matrix of its own.
    const std::vector<Part> first = {attention_layer(2, 10), mlp_layer(true), attention_layer(4, 6),
                                     mlp_layer(true)};
    std::vector<Part> then = first;
    then[1] = mlp_layer(false);
    return {.runs = {{.parts = {embedding_part()}},
                     {.parts = {other_part("before {}", "before.{}", 8)}, .count = 2},
                     {.parts = first, .is_layer = true},
                     {.parts = {other_part("between", "between", 64)}},
                     {.parts = then, .is_layer = true},
                     {.parts = {other_part("behind", "behind", 12)}},
                     {.parts = {head_part()}}},
            .sequence_length = tokens,
            .vocabulary = vocabulary,
            .description = "a strange model"};
}

// ---- gradients that share memory

// Two products: the first has `channels` outputs, the second `width` outputs.
inline int two_products(Trace& t, const std::string& name, int x, std::int64_t channels, std::int64_t width) {
    const int u = product(t, name + ".up", gather(t, x), {channels}, by_outputs(0, "channels"), true, normal);
    return scatter(t, product(t, name + ".down", u, {width}, by_inputs(), true, normal));
}
// One gradient serves the output and three values. The backward pass adds to the gradient of one of these
// values before it uses that of another.
inline Part layer_of_one_gradient() {
    Trace t("one {}", "h.{}", tokens, narrow);
    const int x = t.input();
    const int early = two_products(t, "early", layernorm(t, "ln_1", x, true), 64, narrow);
    const int late = two_products(t, "late", layernorm(t, "ln_2", x, false), 8, narrow);
    return t.finish(add(t, add(t, x, early), late));
}
// A stream of another width inside the layer. The weights' gradients are computed from a gradient to which
// the backward pass adds afterwards.
inline Part layer_of_a_wide_stream() {
    Trace t("wide {}", "h.{}", tokens, narrow);
    const int x = two_products(t, "widen", layernorm(t, "ln_1", t.input(), true), 8, wide);
    const int y = two_products(t, "mlp", layernorm(t, "ln_2", x, true), 12, wide);
    const auto [sum, normalised] = add_layernorm(t, "ln_3", x, y, true);
    const int near = two_products(t, "near", sum, 4, narrow);
    return t.finish(add(t, near, two_products(t, "far", normalised, 4, narrow)));
}
// The layer adds a sum to its input. The sum is one value added to itself, and is also normalised.
inline Part layer_of_an_input() {
    Trace t("input {}", "h.{}", tokens, narrow);
    const int x = t.input();
    const int o = two_products(t, "first", layernorm(t, "ln_1", x, true), 8, narrow);
    const auto [sum, normalised] = add_layernorm(t, "ln_2", o, o, true);
    return t.finish(add(t, add(t, x, sum), two_products(t, "second", normalised, 8, narrow)));
}
// Only the normalisation uses the sum, so the sum's gradient is the normalisation's.
inline Part layer_of_a_norm() {
    Trace t("norm {}", "h.{}", tokens, narrow);
    const int x = t.input();
    return t.finish(add_layernorm(t, "ln_1", x, two_products(t, "mlp", x, 8, narrow), true).normalised);
}
// ---- legal traces that are rare

inline int attention_on(Trace& t, const std::string& name, int x, bool is_gelu = false) {
    const std::string qkv = name + ".qkv";
    const ProductSplit heads = by_outputs(1, "heads");
    const int q = is_gelu ? product_gelu(t, qkv, gather(t, x), {3, 4, 6}, heads, true, normal)
                          : product(t, qkv, gather(t, x), {3, 4, 6}, heads, true, normal);
    return product(t, name + ".out", attention(t, name, q, {4, 4}), {narrow}, by_inputs(), true, normal);
}
// Each layer ends in a norm. Its last operation therefore also makes values that are kept, and its output is
// no sum.
inline Part rare_layer(const char* name, int (*trace)(Trace& t, int x)) {
    Trace t(name, "h.{}", tokens, narrow);
    return t.finish(layernorm(t, "ln_last", trace(t, t.input()), true));
}
// The input is added to a sum that has it already.
inline int dense(Trace& t, int x) {
    const int h = add(t, x, two_products(t, "early", layernorm(t, "ln_1", x, true), 8, narrow));
    const int g = add(t, x, h);
    return add(t, g, two_products(t, "late", layernorm(t, "ln_2", g, true), 8, narrow));
}
// A sum and a norm of one value share a gradient, and the norm adds to it.
inline int norm_beside_sum(Trace& t, int x) { return add(t, x, layernorm(t, "ln_1", x, true)); }
// Partial sums are added over the ranks twice.
inline int scattered_twice(Trace& t, int x) {
    const int o = attention_on(t, "attn", layernorm(t, "ln_1", x, true));
    return add(t, add(t, x, scatter(t, o)), scatter(t, o));
}
inline int attention_on_gelu(Trace& t, int x) {
    return add(t, x, scatter(t, attention_on(t, "attn", layernorm(t, "ln_1", x, true), true)));
}
// Generation needs the residual stream before the attention for all rows, but after it only for the new rows.
inline int attention_late(Trace& t, int x) {
    const int h = add(t, x, two_products(t, "mlp", layernorm(t, "ln_1", x, true), 8, narrow));
    const int g = add(t, h, scatter(t, attention_on(t, "attn", layernorm(t, "ln_2", h, true))));
    return add(t, g, scatter(t, attention_on(t, "again", layernorm(t, "ln_3", g, true))));
}
// Two values are called "input.sum", and two "attn".
inline int names_of_others(Trace& t, int x) {
    const int q = product(t, "attn", gather(t, layernorm(t, "ln_1", x, true)), {3, 4, 6},
                          by_outputs(1, "heads"), true, normal);
    const int a =
        scatter(t, product(t, "out", attention(t, "attn", q, {4, 4}), {narrow}, by_inputs(), true, normal));
    const int h = add(t, a, x);
    const int g = add(t, two_products(t, "mlp", layernorm(t, "ln_2", h, true), 8, narrow), x);
    return add(t, h, add(t, g, layernorm(t, "ln_3", g, true)));
}
// The head has a value with the name of its memory for logits.
inline Model model_of_rare_layers() {
    Trace head("head", "", tokens, narrow);
    head_loss(head, gather(head, layernorm(head, "logits", head.input(), true)), table(), true);
    return {
        .runs = {{.parts = {embedding_part()}},
                 {.parts = {rare_layer("dense {}", dense), rare_layer("beside {}", norm_beside_sum),
                            rare_layer("twice {}", scattered_twice), rare_layer("gelu {}", attention_on_gelu),
                            rare_layer("late {}", attention_late), rare_layer("names {}", names_of_others)},
                  .is_layer = true},
                 {.parts = {head.finish()}}},
        .sequence_length = tokens,
        .vocabulary = vocabulary,
        .description = "a model of rare layers"};
}

// The embedding's two tables and the head's norm are one unit. With sequence parallelism, each rank computes
// the whole gradient of the positions, but only a part of the norm's.
inline Model model_of_shared_gradients() {
    ParamSpec of_tokens = table();
    of_tokens.name = "ends.tokens";
    const ParamSpec positions{.name = "ends.positions", .shape = {tokens, narrow}, .init = normal};
    Trace first("embedding", "", tokens);
    Trace last("head", "", tokens, narrow);
    head_loss(last, gather(last, layernorm(last, "ends.ln", last.input(), true)), of_tokens, true);
    return {.runs = {{.parts = {first.finish(scatter(first, embedding(first, of_tokens, positions)))}},
                     {.parts = {layer_of_one_gradient(), layer_of_a_wide_stream(), layer_of_an_input(),
                                layer_of_a_norm()},
                      .is_layer = true},
                     {.parts = {last.finish()}}},
            .sequence_length = tokens,
            .vocabulary = vocabulary,
            .description = "a model whose gradients share memory"};
}

}  // namespace llmc::strange
