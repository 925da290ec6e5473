// GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019), with the tensor names
// of its files.
#include <fmt/format.h>

#include <cmath>

#include "llmc/core/text.h"
#include "llmc/model/family.h"
#include "llmc/model/operations.h"

namespace llmc {
namespace {

struct GPTConfig {
    std::int64_t layers, heads, channels, sequence_length, vocabulary;  // L, NH, C, T, V
    bool bias, tied_head;
};
constexpr Init normal{.stddev = 0.02};

// The token embedding, or the table of an untied head.
ParamSpec table(const GPTConfig& m, const char* name) {
    return {.name = name,
            .shape = {m.vocabulary, m.channels},
            .init = normal,
            .tensor_dim = 0,
            .row_multiple = vocabulary_multiple};
}

Part embedding_part(const GPTConfig& m) {
    Trace t("embedding", "", m.sequence_length);
    const ParamSpec wpe{.name = "wpe.weight", .shape = {m.sequence_length, m.channels}, .init = normal};
    return t.finish(scatter(t, embedding(t, table(m, "wte.weight"), wpe)));
}

Part block_part(const GPTConfig& m) {
    const std::int64_t C = m.channels, NH = m.heads, HS = C / NH;
    // Products that add to the residual stream start smaller, by the square root of the number of additions,
    // two per block.
    const Init projection{.stddev = 0.02 / std::sqrt(2.0 * static_cast<double>(m.layers))};

    Trace t("block {}", "h.{}", m.sequence_length, C);
    t.transposes_products_in_files = true;
    const int x = t.input();
    const int n = layernorm(t, "ln_1", x, m.bias);
    const int q = product(t, "attn.c_attn", gather(t, n), {3, NH, HS}, by_outputs(1, "heads (--heads)"),
                          m.bias, normal);
    const int a = attention(t, "attn", q);
    const int o = product(t, "attn.c_proj", a, {C}, by_inputs(), m.bias, projection);
    const auto [h, n2] = add_layernorm(t, "ln_2", x, scatter(t, o), m.bias);
    const int u = product_gelu(t, "mlp.c_fc", gather(t, n2), {saturated_product(4, C)},
                               by_outputs(0, "channels of the MLP"), m.bias, normal);
    const int d = product(t, "mlp.c_proj", u, {C}, by_inputs(), m.bias, projection);
    return t.finish(add(t, h, scatter(t, d)));
}

Part head_part(const GPTConfig& m) {
    Trace t("head", "", m.sequence_length, m.channels);
    const int n = layernorm(t, "ln_f", t.input(), m.bias);
    head_loss(t, gather(t, n), table(m, m.tied_head ? "wte.weight" : "lm_head.weight"), m.tied_head);
    return t.finish();
}

Model make(const ModelChoices& choices) {
    const auto size = [&](const char* name) { return choices.size(name); };
    check_divides("heads", "channels", choices);
    const GPTConfig m{size("layers"),     size("heads"),         size("channels"),          size("seq-len"),
                      size("vocab-size"), choices.is_on("bias"), choices.is_on("tied-head")};
    return {.runs = {{.parts = {embedding_part(m)}},
                     {.parts = {block_part(m)}, .count = m.layers, .is_layer = true},
                     {.parts = {head_part(m)}}},
            .sequence_length = m.sequence_length,
            .vocabulary = m.vocabulary,
            .description =
                fmt::format("{}, {}, {} channels, context {}, vocabulary {}{}{}", plural(m.layers, "layer"),
                            plural(m.heads, "head"), m.channels, m.sequence_length, m.vocabulary,
                            m.bias ? "" : ", no biases", m.tied_head ? "" : ", a head of its own"),
            // The causal masks in the files are not weights.
            .files = {.prefix = "transformer.",
                      .passed_over = {".attn.bias", ".attn.masked_bias"},
                      .head = "lm_head.weight",
                      .table = "wte.weight",
                      .no_biases = "--bias=false",
                      .untied_head = "--tied-head=false"}};
}

// The models tiny and mini read bytes. Then come GPT-2's four sizes, and one of GPT-3's with GPT-2's
// vocabulary. Learning rates follow GPT-3's paper (Brown et al., 2020, table 2.1).
const RegisteredFamily registered(
    {.name = "gpt2",
     .options = {{"layers", "Use N transformer blocks (default: the model's)"},
                 {"heads", "Use N attention heads, a divisor of --channels (default: the model's)",
                  OptionKind::division},
                 {"channels", "Use a residual stream of N channels (default: the model's)"},
                 {"seq-len", "Use a context of N tokens (default: the model's)"},
                 {"vocab-size", "Use a vocabulary of N tokens; 256: bytes (default: the model's)"},
                 {"bias", "Use biases in layernorms and linear layers (default: the model's)",
                  OptionKind::on_off, true},
                 {"tied-head", "Use the token embedding's weights in the head too (default: the model's)",
                  OptionKind::on_off, true}},
     .models = {{"tiny", {4, 4, 128, 64, 256}, 4e-3},
                {"mini", {6, 6, 384, 256, 256}, 1e-3},
                {"gpt2", {12, 12, 768, 1024, 50257}, 6e-4},
                {"gpt2-medium", {24, 16, 1024, 1024, 50257}, 3e-4},
                {"gpt2-large", {36, 20, 1280, 1024, 50257}, 2.5e-4},
                {"gpt2-xl", {48, 25, 1600, 1024, 50257}, 2e-4},
                {"gpt3-6.7b", {32, 32, 4096, 2048, 50257}, 1.2e-4}},
     .make = make});

}  // namespace
}  // namespace llmc
