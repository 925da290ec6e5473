// A family like no other, which shows what a model may be: layers of two widths in turn, parts before, between and behind them
// that are no layers, no position embedding, and one matrix that layers on three stages share.
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

// 24 -> 40: attention beside two products that widen its input; what leaves it is normalised twice over.
inline Part attention_layer(std::int64_t heads, std::int64_t head_size) {
    Trace t("attention {}", "h.{}", tokens, narrow);
    const int n = layernorm(t, "ln_1", t.input(), false);
    const int q =
        product(t, "attn.qkv", gather(t, n), {3, heads, head_size}, by_outputs(1, "heads"), true, normal);
    const int a = product(t, "attn.out", attention(t, "attn", q), {wide}, by_inputs(), false, normal);
    const int u = product(t, "skip.up", gather(t, t.input()), {12}, by_outputs(0, "channels"), false, normal);
    const int d = product(t, "skip.down", u, {wide}, by_inputs(), true, normal);
    const auto [sum, n2] = add_layernorm(t, "ln_2", scatter(t, d), scatter(t, a), true);
    return t.finish(add(t, sum, n2));
}

// 40 -> 24: an MLP, and a second way of two products, of which the first may be with a matrix of several layers.
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

// 24 -> 24, no layer: what comes before the layers, between these and behind them.
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

// Of a pipeline of four stages the first, the second and the last have the shared matrix; of three stages, each.
inline Model model() {
    // Four layers in turn, and these once more but for one that has a matrix of its own.
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

// Two products, of which the first makes so many channels, and the second a stream of so many.
inline int two_products(Trace& t, const std::string& name, int x, std::int64_t channels, std::int64_t width) {
    const int u = product(t, name + ".up", gather(t, x), {channels}, by_outputs(0, "channels"), true, normal);
    return scatter(t, product(t, name + ".down", u, {width}, by_inputs(), true, normal));
}
// The gradient of the output is that of three values, and one of them is added to before another is used.
inline Part layer_of_one_gradient() {
    Trace t("one {}", "h.{}", tokens, narrow);
    const int x = t.input();
    const int early = two_products(t, "early", layernorm(t, "ln_1", x, true), 64, narrow);
    const int late = two_products(t, "late", layernorm(t, "ln_2", x, false), 8, narrow);
    return t.finish(add(t, add(t, x, early), late));
}
// A stream of another width inside: a gradient that weights need is added to afterwards.
inline Part layer_of_a_wide_stream() {
    Trace t("wide {}", "h.{}", tokens, narrow);
    const int x = two_products(t, "widen", layernorm(t, "ln_1", t.input(), true), 8, wide);
    const int y = two_products(t, "mlp", layernorm(t, "ln_2", x, true), 12, wide);
    const auto [sum, normalised] = add_layernorm(t, "ln_3", x, y, true);
    const int near = two_products(t, "near", sum, 4, narrow);
    return t.finish(add(t, near, two_products(t, "far", normalised, 4, narrow)));
}
// What is added to its input is first added to the normalisation's input twice over.
inline Part layer_of_an_input() {
    Trace t("input {}", "h.{}", tokens, narrow);
    const int x = t.input();
    const int o = two_products(t, "first", layernorm(t, "ln_1", x, true), 8, narrow);
    const auto [sum, normalised] = add_layernorm(t, "ln_2", o, o, true);
    return t.finish(add(t, add(t, x, sum), two_products(t, "second", normalised, 8, narrow)));
}
// The sum is nobody's: its gradient is the normalisation's alone.
inline Part layer_of_a_norm() {
    Trace t("norm {}", "h.{}", tokens, narrow);
    const int x = t.input();
    return t.finish(add_layernorm(t, "ln_1", x, two_products(t, "mlp", x, 8, narrow), true).normalised);
}
// The embedding's two tables and the head's norm are one unit: with sequence parallelism ranks make the positions' gradient
// whole, and parts of the norm's.
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
