// Llama (Touvron et al., "LLaMA", 2023) and its kin: Mistral, Qwen 2.5 and 3, OLMo 2, with the tensor names of
// Hugging Face's files. They differ in a few choices, which are options.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/model/config_json.h"
#include "llmc/model/family.h"
#include "llmc/model/operations.h"

namespace llmc {
namespace {

struct Llama {
    std::int64_t layers, channels, mlp, sequence_length, vocabulary;  // L, C, F, T, V
    HeadCounts heads;                                                 // H, K
    std::int64_t head_size, window;                                   // D, W
    RopeAngles angles;
    double eps, z_loss;
    bool tied_head, qkv_bias, norms_behind;
    std::string qk_norm;
};
constexpr Init normal{.stddev = 0.02};

Part embedding_part(const Llama& m) {
    Trace t("embedding", "", m.sequence_length);
    return t.finish(
        scatter(t, embedding(t, vocabulary_table("embed_tokens.weight", m.vocabulary, m.channels, normal),
                             std::nullopt)));
}

// The attention of x, as a sum over the ranks.
int attention_of(Trace& t, const Llama& m, int x, const Init& projection) {
    const int qkv = qkv_product(t, "self_attn", gather(t, x), m.heads, m.head_size, m.qkv_bias, normal);
    int attended = 0;
    if (m.qk_norm == "none") {
        attended = attention(t, "self_attn", rope(t, qkv, m.heads, m.angles), m.heads, m.window);
    } else {
        const int normed =
            head_norm(t, qkv, m.heads, {"self_attn.q_norm", "self_attn.k_norm", m.qk_norm == "all", m.eps});
        attended = attention(t, "self_attn", qkv, m.heads, m.window, rope(t, normed, m.heads, m.angles));
    }
    return scatter(t, product(t, "self_attn.o_proj", attended, {m.channels}, by_inputs(), false, projection));
}

int mlp_of(Trace& t, const Llama& m, int x, const Init& projection) {
    const Piece channels{m.mlp, "channels of the MLP (--mlp-size)"};
    const int gate_up =
        packed_product(t, "mlp.gate_up", gather(t, x),
                       {{"mlp.gate_proj", channels}, {"mlp.up_proj", channels}}, {}, false, normal);
    return scatter(t, product(t, "mlp.down_proj", swiglu(t, "mlp", gate_up), {m.channels}, by_inputs(), false,
                              projection));
}

Part block_part(const Llama& m) {
    // Products that add to the residual stream start smaller, by the square root of the number of additions,
    // two per block.
    const Init projection{.stddev = 0.02 / std::sqrt(2.0 * static_cast<double>(m.layers))};
    Trace t("block {}", "layers.{}", m.sequence_length, m.channels);
    const int x = t.input();
    if (m.norms_behind) {  // OLMo 2
        const int a = attention_of(t, m, x, projection);
        const int h = add(t, x, rmsnorm(t, "post_attention_layernorm", a, true, m.eps));
        const int d = mlp_of(t, m, h, projection);
        return t.finish(add(t, h, rmsnorm(t, "post_feedforward_layernorm", d, true, m.eps)));
    }
    const int a = attention_of(t, m, rmsnorm(t, "input_layernorm", x, true, m.eps), projection);
    const auto [h, n] = add_rmsnorm(t, "post_attention_layernorm", x, a, true, m.eps);
    return t.finish(add(t, h, mlp_of(t, m, n, projection)));
}

Part head_part(const Llama& m) {
    Trace t("head", "", m.sequence_length, m.channels);
    const int n = rmsnorm(t, "norm", t.input(), true, m.eps);
    head_loss(t, gather(t, n),
              vocabulary_table(m.tied_head ? "embed_tokens.weight" : "lm_head.weight", m.vocabulary,
                               m.channels, normal),
              m.tied_head, {.z_loss = static_cast<float>(m.z_loss)});
    return t.finish();
}

Llama config_of(const ModelChoices& choices) {
    const auto size = [&](const char* name) { return choices.size(name); };
    const auto [H, K, D] = head_sizes(choices);
    return {.layers = size("layers"),
            .channels = size("channels"),
            .mlp = size("mlp-size"),
            .sequence_length = size("seq-len"),
            .vocabulary = size("vocab-size"),
            .heads = {H, K},
            .head_size = D,
            .window = size("window"),
            .angles = {size("seq-len"), D, rope_theta(choices), rope_scaling(choices)},
            .eps = choices.number("norm-eps"),
            .z_loss = choices.number("z-loss"),
            .tied_head = choices.is_on("tied-head"),
            .qkv_bias = choices.is_on("qkv-bias"),
            .norms_behind = choices.text("norms") == "behind",
            .qk_norm = choices.text("qk-norm")};
}

Model make(const ModelChoices& choices) {
    const Llama m = config_of(choices);
    return {
        .runs = {{.parts = {embedding_part(m)}},
                 {.parts = {block_part(m)}, .count = m.layers, .is_layer = true},
                 {.parts = {head_part(m)}}},
        .sequence_length = m.sequence_length,
        .vocabulary = m.vocabulary,
        .description = fmt::format(
            "{}, {} and {} of keys of {}, {} channels, MLP of {}, context {}, vocabulary {}{}{}{}{}{}",
            plural(m.layers, "layer"), plural(m.heads.queries, "head"), m.heads.keys, m.head_size, m.channels,
            m.mlp, m.sequence_length, m.vocabulary, m.window > 0 ? fmt::format(", window {}", m.window) : "",
            m.qkv_bias ? ", biases of q, k, v" : "",
            m.qk_norm != "none" ? fmt::format(", QK-norm ({})", m.qk_norm) : "",
            m.norms_behind ? ", norms behind" : "", m.tied_head ? ", tied head" : ""),
        .files = {.prefix = "model.",
                  .writes_prefix = true,
                  .passed_over = {"rotary_emb.inv_freq"},
                  .head = "lm_head.weight",
                  .table = "embed_tokens.weight",
                  .no_biases = "--qkv-bias=false",
                  .untied_head = "--tied-head=false"}};
}

// ---- config.json

// What a model_type fixes, and the defaults of its class in Hugging Face's library.
struct Kind {
    std::string_view model_type;
    const char* architecture;
    bool has_window, qkv_bias;
    const char *qk_norm, *norms;
    double eps;
    std::int64_t key_heads, head_size, positions;  // 0: as many as heads; channels / heads
};
constexpr std::array kinds = {
    Kind{"llama", "LlamaForCausalLM", false, false, "none", "before", 1e-6, 0, 0, 2048},
    Kind{"mistral", "MistralForCausalLM", true, false, "none", "before", 1e-6, 8, 0, 131072},
    Kind{"qwen2", "Qwen2ForCausalLM", false, true, "none", "before", 1e-6, 32, 0, 32768},
    Kind{"qwen3", "Qwen3ForCausalLM", false, false, "head", "before", 1e-6, 32, 128, 32768},
    Kind{"olmo2", "Olmo2ForCausalLM", false, false, "all", "behind", 1e-5, 0, 0, 2048}};
constexpr std::int64_t default_window = 4096, default_first_window = 28;
constexpr const char *full_attention = "full_attention", *sliding_attention = "sliding_attention";

// The window that the keys name; 0: none. Null means none, and Qwen's counts only if it is switched on.
std::int64_t named_window(ConfigReader& config, const Kind& kind) {
    if (!kind.has_window && !config.is_on("use_sliding_window", false)) return 0;
    if (!config.names("sliding_window")) return default_window;
    return config.has("sliding_window") ? config.size("sliding_window") : 0;
}

// Qwen's layers from max_window_layers on have the window, unless each layer has its type.
bool has_window_in_last_layers(ConfigReader& config, std::int64_t layers) {
    return !config.has("layer_types") &&
           config.number("max_window_layers", default_first_window) < static_cast<double>(layers);
}

// The window of all layers in this context; 0: none. UserError if layers differ. A window that is not shorter than the
// context changes nothing, whichever layers have it.
std::int64_t window_of(ConfigReader& config, const Kind& kind, std::int64_t layers, std::int64_t context) {
    const std::int64_t window = named_window(config, kind);
    const bool is_shorter = window < context;
    std::vector<std::string> types = config.texts("layer_types");
    if (!is_shorter) std::ranges::replace(types, sliding_attention, full_attention);
    for (const std::string& type : types) {
        if (type != types.front())
            config.refuse(
                "layer_types",
                fmt::format("has \"{}\" and \"{}\", but here all layers are alike; give another model",
                            types.front(), type));
    }
    const bool is_full = !types.empty() && types.front() == full_attention;
    if (!types.empty() && !is_full && !(kind.has_window && types.front() == sliding_attention))
        config.refuse("layer_types",
                      fmt::format("has {}, which is not computed; give another model", types.front()));
    if (!kind.has_window && window > 0 && is_shorter && has_window_in_last_layers(config, layers))
        config.refuse("use_sliding_window",
                      fmt::format("gives layers of this model a window of {}, which is not computed; give a "
                                  "--seq-len of at most {}, or another model",
                                  window, window));
    return kind.has_window && !is_full ? window : 0;
}

ModelChoices from_config(ConfigReader& config) {
    const Kind& kind = *std::ranges::find(kinds, config.text("model_type", ""), &Kind::model_type);
    config.require("hidden_act", {"silu", "swish"});
    // Hugging Face's Qwen 2.5 has its biases whatever the key says.
    config.require("attention_bias", kind.qkv_bias ? std::vector<nlohmann::ordered_json>{false, true}
                                                   : std::vector<nlohmann::ordered_json>{false});
    config.require("mlp_bias", {false});
    const std::int64_t L = config.size("num_hidden_layers"), H = config.size("num_attention_heads");
    const std::int64_t context = config.context(config.size("max_position_embeddings", kind.positions));
    ModelChoices choices;
    choices.values = {
        {"layers", L},
        {"heads", H},
        {"channels", config.size("hidden_size")},
        {"mlp-size", config.size("intermediate_size")},
        {"seq-len", context},
        {"vocab-size", config.size("vocab_size")},
        {"kv-heads", config.size("num_key_value_heads", kind.key_heads > 0 ? kind.key_heads : H)},
        {"head-size", config.has("head_dim") ? config.size("head_dim") : kind.head_size},
        {"window", window_of(config, kind, L, context)},
        {"norm-eps", config.number("rms_norm_eps", kind.eps)},
        {"z-loss", 0.0},
        {"qk-norm", std::string(kind.qk_norm)},
        {"norms", std::string(kind.norms)},
        {"qkv-bias", kind.qkv_bias},
        {"tied-head", config.is_on("tie_word_embeddings", false)}};
    read_rope(config, choices, kind.positions);
    return choices;
}

// The kind of a folder's model, or the one that computes a model of ours. UserError names the first option that the
// kind does not have.
const Kind& kind_of(const ModelChoices& choices, const std::string& model_type) {
    const std::int64_t window = choices.size("window");
    const auto differing = [&](const Kind& kind) {
        std::vector<std::string> options;
        if (window > 0 && !kind.has_window) options.push_back(fmt::format("window {}", window));
        if (choices.is_on("qkv-bias") != kind.qkv_bias)
            options.push_back(fmt::format("qkv-bias={}", choices.is_on("qkv-bias")));
        if (choices.text("qk-norm") != kind.qk_norm) options.push_back("qk-norm " + choices.text("qk-norm"));
        if (choices.text("norms") != kind.norms) options.push_back("norms " + choices.text("norms"));
        return options;
    };
    // A norm of queries and keys, or its place, says more about a model than a window.
    const auto differences = [&](const Kind& kind) {
        const int of_norms =
            (choices.text("qk-norm") != kind.qk_norm ? 2 : 0) + (choices.text("norms") != kind.norms ? 2 : 0);
        return std::ssize(differing(kind)) + of_norms;
    };
    const auto* kind = std::ranges::find(kinds, model_type, &Kind::model_type);
    if (model_type.empty()) kind = std::ranges::min_element(kinds, {}, differences);
    if (const auto options = differing(*kind); !options.empty())
        user_error(
            "--export: Hugging Face's {} cannot compute this model with --{}; export a single .safetensors "
            "file",
            kind->architecture, options.front());
    return *kind;
}

// The keys of windows stay if they say the same.
void write_windows(const ModelChoices& choices, nlohmann::ordered_json& config, const Kind& kind,
                   ConfigWriter& to) {
    const std::int64_t L = choices.size("layers"), T = choices.size("seq-len"),
                       window = choices.size("window");
    ConfigReader given(config, "config.json");
    const std::int64_t named = named_window(given, kind);
    // More layers have no window either.
    if (!kind.has_window && named > 0 && named < T && has_window_in_last_layers(given, L))
        config["max_window_layers"] = L;
    const bool stays = !to.is_new() && window_of(given, kind, L, T) == window;
    // Mistral's window has a default, and null or the layers' types mean none.
    const bool says_no_window = (config.contains("sliding_window") && config["sliding_window"].is_null()) ||
                                config.contains("layer_types");
    if (!stays && kind.has_window && !(window == 0 && says_no_window))
        to.set("sliding_window", window > 0 ? nlohmann::ordered_json(window) : nullptr, default_window);
    std::vector<std::string> types = given.texts("layer_types");
    if (types.empty()) return;
    if (!stays) types.assign(1, window > 0 ? sliding_attention : full_attention);
    types.resize(static_cast<std::size_t>(L), std::string(types.back()));
    config["layer_types"] = types;
}

void to_config(const ModelChoices& choices, nlohmann::ordered_json& config) {
    const Kind& kind = kind_of(choices, config.value("model_type", ""));
    const auto [H, K, D] = head_sizes(choices);
    const std::int64_t C = choices.size("channels");
    ConfigWriter to(config);
    to.set("architectures", nlohmann::ordered_json::array({kind.architecture}));
    to.set("model_type", kind.model_type);
    to.set("vocab_size", choices.size("vocab-size"));
    to.set("hidden_size", C);
    to.set("intermediate_size", choices.size("mlp-size"));
    to.set("num_hidden_layers", choices.size("layers"));
    to.set("num_attention_heads", H);
    to.set("num_key_value_heads", K, kind.key_heads > 0 ? kind.key_heads : H);
    to.set("head_dim", D, kind.head_size > 0 ? kind.head_size : C / H);
    to.set_new("hidden_act", "silu");
    to.set_new("max_position_embeddings", choices.size("seq-len"));
    to.set("rms_norm_eps", choices.number("norm-eps"), kind.eps);
    to.set("tie_word_embeddings", choices.is_on("tied-head"), false);
    write_windows(choices, config, kind, to);
    write_rope(choices, config, to.is_new(), kind.positions);
}

using Others = std::vector<std::pair<std::string_view, ModelValue>>;

// A model with K heads of keys, and other choices.
NamedModel model(std::string_view name, const std::vector<std::int64_t>& sizes, double learning_rate,
                 std::int64_t kv_heads, Others others, std::int64_t batch_tokens = 0,
                 std::int64_t context = 0) {
    others.emplace_back("kv-heads", kv_heads);
    return {name, sizes, learning_rate, std::move(others), batch_tokens, context};
}
Others llama3(const char* scaling) { return {{"rope-theta", 5e5}, {"rope-scaling", std::string(scaling)}}; }
Others qwen2() { return {{"rope-theta", 1e6}, {"norm-eps", 1e-6}, {"qkv-bias", true}, {"tied-head", true}}; }
Others qwen3(std::int64_t head_size) {
    return {{"rope-theta", 1e6},
            {"norm-eps", 1e-6},
            {"head-size", head_size},
            {"qk-norm", std::string("head")},
            {"tied-head", true}};
}
Others olmo2() {
    return {{"rope-theta", 5e5},
            {"norm-eps", 1e-6},
            {"qk-norm", std::string("all")},
            {"norms", std::string("behind")}};
}
Others tied(Others others) {
    others.emplace_back("tied-head", true);
    return others;
}

constexpr std::int64_t llama2_batch = 4 << 20, llama2_context = 4096, llama3_batch = 16 << 20,
                       llama3_context = 8192;

// Models of bytes come first, then published ones (docs/models.md has their sources). The sizes are layers,
// heads, channels, mlp-size, seq-len, vocab-size.
const RegisteredFamily registered(
    {.name = "llama",
     .options = {family_option("layers"), family_option("heads"), family_option("channels"),
                 family_option("mlp-size"), family_option("seq-len"), family_option("vocab-size"),
                 family_option("kv-heads", std::int64_t{0}), family_option("head-size", std::int64_t{0}),
                 family_option("window", std::int64_t{0}), family_option("rope-theta", 1e4),
                 family_option("rope-scaling", std::string("none")), family_option("norm-eps", 1e-5),
                 family_option("z-loss", 0.0), family_option("qk-norm", std::string("none")),
                 family_option("norms", std::string("before")), family_option("qkv-bias", false),
                 family_option("tied-head", false)},
     .models =
         {model("llama-tiny", {4, 4, 128, 352, 64, 256}, 4e-3, 2, {}),
          model("llama-mini", {6, 6, 384, 1024, 256, 256}, 1e-3, 2, {}),
          model("qwen3-tiny", {4, 4, 128, 352, 64, 256}, 4e-3, 2, qwen3(48)),
          model("qwen2.5-0.5b", {24, 14, 896, 4864, 2048, 151936}, 3e-4, 2, qwen2()),
          model("qwen3-0.6b", {28, 16, 1024, 3072, 2048, 151936}, 3e-4, 8, qwen3(128)),
          model("llama3.2-1b", {16, 32, 2048, 8192, 2048, 128256}, 3e-4, 8, tied(llama3("32,1,4,8192"))),
          model("llama3.2-3b", {28, 24, 3072, 8192, 2048, 128256}, 3e-4, 8, tied(llama3("32,1,4,8192"))),
          model("llama2-7b", {32, 32, 4096, 11008, 2048, 32000}, 3e-4, 32, {}, llama2_batch, llama2_context),
          model("mistral-7b", {32, 32, 4096, 14336, 2048, 32000}, 3e-4, 8, {{"window", std::int64_t{4096}}}),
          model("olmo2-7b", {32, 32, 4096, 11008, 2048, 100352}, 3e-4, 32, olmo2()),
          model("llama3-8b", {32, 32, 4096, 14336, 2048, 128256}, 3e-4, 8, llama3("none"), llama3_batch,
                llama3_context),
          model("llama3-70b", {80, 64, 8192, 28672, 2048, 128256}, 1.5e-4, 8, llama3("none"), llama3_batch,
                llama3_context),
          model("llama3-405b", {126, 128, 16384, 53248, 2048, 128256}, 8e-5, 8, llama3("8,1,4,8192"),
                llama3_batch, llama3_context)},
     .make = make,
     .model_types = {"llama", "mistral", "qwen2", "qwen3", "olmo2"},
     .from_config = from_config,
     .to_config = to_config});

}  // namespace
}  // namespace llmc
