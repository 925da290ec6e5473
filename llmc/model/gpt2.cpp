#include "llmc/model/gpt2.h"

#include <cmath>

#include "llmc/model/operations.h"

namespace llmc {

namespace {

constexpr Init normal{.stddev = 0.02};

// The token embedding, which is the head too.
ParamSpec wte(const GPTConfig& m) {
    return {.name = "wte.weight",
            .shape = {m.vocabulary, m.channels},
            .init = normal,
            .tensor_dim = 0,
            .row_multiple = vocabulary_multiple};
}

Part embedding_part(const GPTConfig& m) {
    Trace t("embedding", "", m.sequence_length);
    const ParamSpec wpe{.name = "wpe.weight", .shape = {m.sequence_length, m.channels}, .init = normal};
    return t.finish(scatter(t, embedding(t, wte(m), wpe)));
}

Part block_part(const GPTConfig& m) {
    const std::int64_t C = m.channels, NH = m.heads, HS = m.head_size();
    // What is added to the residual stream is scaled by the number of additions, two a block.
    const Init projection{.stddev = 0.02 / std::sqrt(2.0 * static_cast<double>(m.layers))};
    constexpr bool bias = true;

    Trace t("block {}", "h.{}", m.sequence_length, C);
    t.transposes_products_in_files = true;
    const int x = t.input();
    const int n = layernorm(t, "ln_1", x, bias);
    const int q = product(t, "attn.c_attn", gather(t, n), {3, NH, HS}, by_outputs(1), bias, normal);
    const int a = attention(t, "attn", q);
    const int o = product(t, "attn.c_proj", a, {C}, by_inputs(), bias, projection);
    const auto [h, n2] = add_layernorm(t, "ln_2", x, scatter(t, o), bias);
    const int u = product_gelu(t, "mlp.c_fc", gather(t, n2), {4 * C}, by_outputs(0), bias, normal);
    const int d = product(t, "mlp.c_proj", u, {C}, by_inputs(), bias, projection);
    return t.finish(add(t, h, scatter(t, d)));
}

Part head_part(const GPTConfig& m) {
    Trace t("head", "", m.sequence_length, m.channels);
    const int n = layernorm(t, "ln_f", t.input(), true);
    head_loss(t, gather(t, n), wte(m), true);
    return t.finish();
}

}  // namespace

Model gpt2(const GPTConfig& m) {
    return {.runs = {{.part = embedding_part(m)},
                     {.part = block_part(m), .count = m.layers, .is_layer = true},
                     {.part = head_part(m)}},
            .sequence_length = m.sequence_length,
            .vocabulary = m.vocabulary};
}

}  // namespace llmc
