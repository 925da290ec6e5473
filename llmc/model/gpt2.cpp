// GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019), with the tensor names
// of its files.
#include <fmt/format.h>

#include <array>
#include <cmath>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/model/config_json.h"
#include "llmc/model/family.h"
#include "llmc/model/operations.h"

namespace llmc {
namespace {

struct GPTConfig {
    std::int64_t layers, heads, channels, sequence_length, vocabulary;  // L, NH, C, T, V
    std::int64_t positions;                                             // rows of the table of positions
    bool bias, tied_head;
    double z_loss;
};
constexpr Init normal{.stddev = 0.02};

Part embedding_part(const GPTConfig& m) {
    Trace t("embedding", "", m.sequence_length);
    const ParamSpec wpe{.name = "wpe.weight", .shape = {m.positions, m.channels}, .init = normal};
    return t.finish(
        scatter(t, embedding(t, vocabulary_table("wte.weight", m.vocabulary, m.channels, normal), wpe)));
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
    const int a = attention(t, "attn", q, {NH, NH});
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
    head_loss(
        t, gather(t, n),
        vocabulary_table(m.tied_head ? "wte.weight" : "lm_head.weight", m.vocabulary, m.channels, normal),
        m.tied_head, {.z_loss = static_cast<float>(m.z_loss)});
    return t.finish();
}

// Hugging Face's names of the sizes.
constexpr std::array<std::pair<const char*, const char*>, 5> keys = {{{"layers", "n_layer"},
                                                                      {"heads", "n_head"},
                                                                      {"channels", "n_embd"},
                                                                      {"seq-len", "n_positions"},
                                                                      {"vocab-size", "vocab_size"}}};

ModelChoices from_config(ConfigReader& config) {
    ModelChoices choices = choices_of("gpt2");
    for (const auto& [option, key] : keys)
        choices.values.insert_or_assign(option, config.size(key, choices.size(option)));
    const std::int64_t positions = choices.size("seq-len");
    choices.values.insert_or_assign("positions", positions);
    choices.values.insert_or_assign("seq-len", config.context(positions));
    choices.values.insert_or_assign("tied-head", config.is_on("tie_word_embeddings", true));
    config.require("activation_function", {"gelu_new", "gelu_pytorch_tanh"});
    config.require("n_inner", {saturated_product(4, choices.size("channels"))});
    config.require("layer_norm_epsilon", {1e-5});
    config.require("scale_attn_weights", {true});
    config.require("scale_attn_by_inverse_layer_idx", {false});
    config.require("add_cross_attention", {false});
    return choices;
}

void to_config(const ModelChoices& choices, nlohmann::ordered_json& config) {
    if (!choices.is_on("bias"))
        user_error(
            "--export: Hugging Face's GPT2LMHeadModel cannot compute this model with --bias=false; export a "
            "single .safetensors file");
    ConfigWriter to(config);
    to.set("architectures", nlohmann::ordered_json::array({"GPT2LMHeadModel"}));
    to.set("model_type", "gpt2");
    for (const auto& [option, key] : keys) {
        const bool is_positions = option == std::string_view("seq-len") && choices.size("positions") > 0;
        to.set(key, choices.size(is_positions ? "positions" : option));
    }
    to.correct("n_inner", saturated_product(4, choices.size("channels")));
    to.set("tie_word_embeddings", choices.is_on("tied-head"), true);
}

Model make(const ModelChoices& choices) {
    const auto size = [&](const char* name) { return choices.size(name); };
    check_divides("heads", "channels", choices);
    const std::int64_t T = size("seq-len"), positions = size("positions") > 0 ? size("positions") : T;
    if (positions < T)
        user_error("--seq-len {} is longer than the table of --positions {}; give a shorter context", T,
                   positions);
    const GPTConfig m{.layers = size("layers"),
                      .heads = size("heads"),
                      .channels = size("channels"),
                      .sequence_length = T,
                      .vocabulary = size("vocab-size"),
                      .positions = positions,
                      .bias = choices.is_on("bias"),
                      .tied_head = choices.is_on("tied-head"),
                      .z_loss = choices.number("z-loss")};
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
// 0.5M tokens (Radford et al. 2019); 2M for 6.7B parameters and 3.2M for 175B (Brown et al. 2020, table 2.1).
constexpr std::int64_t gpt2_batch = 1 << 19, gpt3_small_batch = 2 << 20, gpt3_batch = 3 << 20;

const RegisteredFamily registered(
    {.name = "gpt2",
     .options = {family_option("layers"), family_option("heads"), family_option("channels"),
                 family_option("seq-len"), family_option("vocab-size"), family_option("bias", true),
                 family_option("positions", std::int64_t{0}), family_option("tied-head", true),
                 family_option("z-loss", 0.0)},
     .models = {{"tiny", {4, 4, 128, 64, 256}, 4e-3},
                {"mini", {6, 6, 384, 256, 256}, 1e-3},
                {"gpt2", {12, 12, 768, 1024, 50257}, 6e-4, {}, gpt2_batch},
                {"gpt2-medium", {24, 16, 1024, 1024, 50257}, 3e-4, {}, gpt2_batch},
                {"gpt2-large", {36, 20, 1280, 1024, 50257}, 2.5e-4, {}, gpt2_batch},
                {"gpt2-xl", {48, 25, 1600, 1024, 50257}, 2e-4, {}, gpt2_batch},
                {"gpt3-6.7b", {32, 32, 4096, 2048, 50257}, 1.2e-4, {}, gpt3_small_batch},
                {"gpt3-175b", {96, 96, 12288, 2048, 50257}, 0.6e-4, {}, gpt3_batch}},
     .make = make,
     .model_types = {"gpt2"},
     .from_config = from_config,
     .to_config = to_config});

}  // namespace
}  // namespace llmc
