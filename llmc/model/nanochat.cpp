// nanochat's model (Karpathy, 2025), with the tensor names of Hugging Face's files. Its norms have no weights, one
// of them comes right behind the embedding, and its logits are capped.
#include <fmt/format.h>

#include "llmc/core/text.h"
#include "llmc/model/config_json.h"
#include "llmc/model/family.h"
#include "llmc/model/operations.h"

namespace llmc {
namespace {

struct Nanochat {
    std::int64_t layers, channels, mlp, sequence_length, vocabulary;  // L, C, F, T, V
    HeadCounts heads;                                                 // H, K
    RopeAngles angles;
    double eps, cap, z_loss;
};
constexpr Init normal{.stddev = 0.02};
constexpr Init zeros{};  // of the products that add to the residual stream

Part embedding_part(const Nanochat& m) {
    Trace t("embedding", "", m.sequence_length);
    const int x =
        scatter(t, embedding(t, vocabulary_table("embed_tokens.weight", m.vocabulary, m.channels, normal),
                             std::nullopt));
    return t.finish(rmsnorm(t, "embedding_norm", x, false, m.eps));
}

Part block_part(const Nanochat& m) {
    Trace t("block {}", "layers.{}", m.sequence_length, m.channels);
    const int x = t.input();
    const int n = rmsnorm(t, "input_layernorm", x, false, m.eps);
    const int qkv = qkv_product(t, "self_attn", gather(t, n), m.heads, m.angles.head_size, false, normal);
    // It rotates by negative angles, and then normalises. A rotation does not change the norm.
    const int qk = rope(t, head_norm(t, qkv, m.heads, {.eps = m.eps}), m.heads, m.angles, true);
    const int a = attention(t, "self_attn", qkv, m.heads, 0, qk);
    const int o = product(t, "self_attn.o_proj", a, {m.channels}, by_inputs(), false, zeros);
    const auto [h, n2] = add_rmsnorm(t, "post_attention_layernorm", x, scatter(t, o), false, m.eps);
    const int u = product(t, "mlp.fc1", gather(t, n2), {m.mlp},
                          by_outputs(0, "channels of the MLP (--mlp-size)"), false, normal);
    const int d = product(t, "mlp.fc2", relu_squared(t, "mlp", u), {m.channels}, by_inputs(), false, zeros);
    return t.finish(add(t, h, scatter(t, d)));
}

Part head_part(const Nanochat& m) {
    Trace t("head", "", m.sequence_length, m.channels);
    const int n = rmsnorm(t, "norm", t.input(), false, m.eps);
    head_loss(t, gather(t, n), vocabulary_table("lm_head.weight", m.vocabulary, m.channels, normal), false,
              {static_cast<float>(m.cap), static_cast<float>(m.z_loss)});
    return t.finish();
}

Model make(const ModelChoices& choices) {
    const auto size = [&](const char* name) { return choices.size(name); };
    const auto [H, K, D] = head_sizes(choices);
    const Nanochat m{.layers = size("layers"),
                     .channels = size("channels"),
                     .mlp = size("mlp-size"),
                     .sequence_length = size("seq-len"),
                     .vocabulary = size("vocab-size"),
                     .heads = {H, K},
                     .angles = {size("seq-len"), D, rope_theta(choices), {}},
                     .eps = choices.number("norm-eps"),
                     .cap = choices.number("logit-cap"),
                     .z_loss = choices.number("z-loss")};
    return {
        .runs = {{.parts = {embedding_part(m)}},
                 {.parts = {block_part(m)}, .count = m.layers, .is_layer = true},
                 {.parts = {head_part(m)}}},
        .sequence_length = m.sequence_length,
        .vocabulary = m.vocabulary,
        .description = fmt::format("{}, {} and {} of keys, {} channels, MLP of {}, context {}, vocabulary {}",
                                   plural(m.layers, "layer"), plural(H, "head"), K, m.channels, m.mlp,
                                   m.sequence_length, m.vocabulary),
        .files = {.prefix = "model.",
                  .writes_prefix = true,
                  .passed_over = {"rotary_emb.inv_freq"},
                  .head = "lm_head.weight",
                  .table = "embed_tokens.weight"}};
}

// The longest context of a config.json without max_position_embeddings.
constexpr std::int64_t default_positions = 2048;

ModelChoices from_config(ConfigReader& config) {
    config.require("hidden_act", {"relu2"});
    config.require("attention_bias", {false});
    config.require("tie_word_embeddings", {false});
    const std::int64_t H = config.size("num_attention_heads"), C = config.size("hidden_size");
    config.require("head_dim", {C / H});
    // Null means no cap, and a missing key this one.
    double cap = config.names("final_logit_softcapping") ? 0 : 15;
    if (config.has("final_logit_softcapping")) {
        cap = config.number("final_logit_softcapping", 0);
        if (!(cap > 0)) config.refuse("final_logit_softcapping", "is 0; give null for no cap");
    }
    ModelChoices choices;
    choices.values = {{"layers", config.size("num_hidden_layers")},
                      {"heads", H},
                      {"channels", C},
                      {"mlp-size", config.size("intermediate_size")},
                      {"seq-len", config.context(config.size("max_position_embeddings", default_positions))},
                      {"vocab-size", config.size("vocab_size")},
                      {"kv-heads", config.size("num_key_value_heads", H)},
                      {"norm-eps", config.number("rms_norm_eps", 1e-6)},
                      {"logit-cap", cap},
                      {"z-loss", 0.0}};
    read_rope(config, choices, default_positions);
    if (rope_scaling(choices))
        config.refuse("rope_scaling", "is given, and this family has none; give another model");
    choices.values.erase("rope-scaling");
    return choices;
}

void to_config(const ModelChoices& choices, nlohmann::ordered_json& config) {
    const std::int64_t H = choices.size("heads"), K = choices.size("kv-heads");
    ConfigWriter to(config);
    to.set("architectures", nlohmann::ordered_json::array({"NanoChatForCausalLM"}));
    to.set("model_type", "nanochat");
    to.set("vocab_size", choices.size("vocab-size"));
    to.set("hidden_size", choices.size("channels"));
    to.set("intermediate_size", choices.size("mlp-size"));
    to.set("num_hidden_layers", choices.size("layers"));
    to.set("num_attention_heads", H);
    to.set("num_key_value_heads", K > 0 ? K : H, H);
    to.set("rms_norm_eps", choices.number("norm-eps"), 1e-6);
    const double cap = choices.number("logit-cap");
    const bool says_no_cap =
        config.contains("final_logit_softcapping") && config["final_logit_softcapping"].is_null();
    if (cap > 0 || !says_no_cap)
        to.set("final_logit_softcapping", cap > 0 ? nlohmann::ordered_json(cap) : nullptr, 15.0);
    to.correct("head_dim", choices.size("channels") / H);
    to.set_new("max_position_embeddings", choices.size("seq-len"));
    to.set_new("hidden_act", "relu2");
    to.set_new("tie_word_embeddings", false);
    ModelChoices of_rope = choices;
    of_rope.values.emplace("rope-scaling", std::string("none"));
    write_rope(of_rope, config, to.is_new(), default_positions);
}

const RegisteredFamily registered(
    {.name = "nanochat",
     .options = {family_option("layers"), family_option("heads"), family_option("channels"),
                 family_option("mlp-size"), family_option("seq-len"), family_option("vocab-size"),
                 family_option("kv-heads", std::int64_t{0}), family_option("rope-theta", 1e4),
                 family_option("norm-eps", 1e-6), family_option("logit-cap", 15.0),
                 family_option("z-loss", 0.0)},
     .models = {{"nanochat-tiny", {4, 4, 128, 512, 64, 256}, 4e-3},
                {"nanochat-d20", {20, 10, 1280, 5120, 2048, 65536}, 3e-4}},
     .make = make,
     .model_types = {"nanochat"},
     .from_config = from_config,
     .to_config = to_config});

}  // namespace
}  // namespace llmc
