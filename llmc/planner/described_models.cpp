#include "llmc/planner/described_models.h"

#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/io/files.h"

namespace llmc {

namespace {

using Json = nlohmann::json;
using Count = std::int64_t;

// The sizes in a config.json.
class Sizes {
  public:
    Sizes(const Json& config, std::string file) : config_(config), file_(std::move(file)) {}

    Count operator()(const char* key) const {
        const Json value = config_.value(key, Json());
        if (!value.is_number_integer() || value.get<Count>() < 1 || value.get<Count>() > 1 << 24)
            user_error("--model: the {} in '{}' is {}, which is no size; get the folder again", key, file_,
                       one_line(value.dump()));
        return value.get<Count>();
    }
    // 0 or `otherwise` if there is none.
    Count operator()(const char* key, Count otherwise) const {
        const bool is_there = config_.contains(key) && !config_[key].is_null() && config_[key] != 0;
        return is_there ? (*this)(key) : otherwise;
    }
    Count tables() const { return config_.value("tie_word_embeddings", Json()) == true ? 1 : 2; }

  private:
    const Json& config_;
    std::string file_;
};

constexpr Count other_length = 4096;  // of pretraining, which a configuration does not say

// A model of which a token uses `active` of `experts` in a layer: parameters(n) counts those with n of them. `width`:
// elements of queries and values of all heads in a layer.
template <class Function>
DescribedModel model_of_experts(const std::string& name, const std::string& description, const Sizes& of,
                                const Function& parameters, Count experts, Count active, Count width) {
    const Count C = of("hidden_size"), L = of("num_hidden_layers");
    return {.name = name,
            .description = fmt::format("{} layers, {}, {} channels, {} of {} experts", L, description, C,
                                       active, experts),
            .parameters = parameters(experts),
            .active_parameters = parameters(active),
            .input_embeddings = of.tables() == 2 ? of("vocab_size") * C : 0,
            .sequence_length = other_length,
            .layers = L,
            .channels = C,
            .attention_per_token = 3.0 * static_cast<double>(L * width)};
}

DescribedModel mixtral(const std::string& name, const Sizes& of) {
    const Count V = of("vocab_size"), C = of("hidden_size"), L = of("num_hidden_layers"),
                H = of("num_attention_heads"), K = of("num_key_value_heads", H), D = of("head_dim", C / H),
                F = of("intermediate_size"), experts = of("num_local_experts"),
                active = of("num_experts_per_tok");
    const auto parameters = [&](Count used) {
        const Count attention = C * (H + 2 * K) * D + H * D * C,
                    layer = attention + C * experts + used * 3 * C * F;
        return of.tables() * V * C + C + L * (layer + 2 * C);
    };
    return model_of_experts(name, fmt::format("{} heads and {} of keys", H, K), of, parameters, experts,
                            active, H * 2 * D);
}

// Without the layer that predicts a second token: latent attention, some dense layers, and layers of which a token uses
// a few routed experts and the shared ones. Version 3 has a bias for each routed expert.
DescribedModel deepseek(const std::string& name, const Sizes& of, bool has_bias) {
    const Count V = of("vocab_size"), C = of("hidden_size"), L = of("num_hidden_layers"),
                H = of("num_attention_heads"), query_rank = of("q_lora_rank", 0),
                key_rank = of("kv_lora_rank"), nope = of("qk_nope_head_dim"), rope = of("qk_rope_head_dim"),
                value = of("v_head_dim"), dense_layers = of("first_k_dense_replace", 0),
                experts = of("n_routed_experts"), shared = of("n_shared_experts", 0),
                active = of("num_experts_per_tok");
    const Count queries = query_rank == 0 ? C * H * (nope + rope)
                                          : C * query_rank + query_rank + query_rank * H * (nope + rope),
                attention = queries + C * (key_rank + rope) + key_rank + key_rank * H * (nope + value) +
                            H * value * C;
    const Count dense = 3 * C * of("intermediate_size"), expert = 3 * C * of("moe_intermediate_size"),
                router = C * experts + (has_bias ? experts : 0);
    const auto parameters = [&](Count used) {
        return of.tables() * V * C + C + L * (attention + 2 * C) + dense_layers * dense +
               (L - dense_layers) * (router + (used + shared) * expert);
    };
    DescribedModel model = model_of_experts(name, fmt::format("{} heads of latent attention", H), of,
                                            parameters, experts, active, H * (nope + rope + value));
    model.description += shared == 1 ? " and a shared one" : fmt::format(" and {} shared", shared);
    return model;
}

// BERT base, cased (config.json of google-bert/bert-base-cased), with its pooler and without a head.
DescribedModel bert() {
    constexpr Count V = 28996, C = 768, L = 12, F = 3072, positions = 512, types = 2, norm = 2 * C;
    constexpr Count layer = 4 * (C * C + C) + norm + C * F + F + F * C + C + norm,
                    all = (V + positions + types) * C + norm + L * layer + C * C + C;
    // Position and type ids: int64 (1, 512) each.
    return {"bert-base-cased",
            "12 layers, 12 heads, 768 channels, tokens see all others",
            all,
            all,
            (V + positions + types) * C,
            512,
            L,
            C,
            2 * 3.0 * 12 * 12 * (64 + 64),
            Count{2} * 512 * 8};
}

// The sizes in the config.json of mistralai/Mixtral-8x7B-v0.1 and of deepseek-ai/DeepSeek-V3.
constexpr const char* mixtral_8x7b =
    R"({"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "num_local_experts": 8,
        "num_experts_per_tok": 2})";
constexpr const char* deepseek_v3 =
    R"({"model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61,
        "num_attention_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 3, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8})";

std::optional<DescribedModel> model_of(const Json& config, const std::string& name, const std::string& file) {
    const Json type = config.is_object() ? config.value("model_type", Json()) : Json();
    const Sizes sizes(config, file);
    if (type == "mixtral") return mixtral(name, sizes);
    if (type == "deepseek_v2" || type == "deepseek_v3") return deepseek(name, sizes, type == "deepseek_v3");
    return std::nullopt;
}

std::vector<DescribedModel> named_models() {
    std::vector<DescribedModel> models = {*model_of(Json::parse(mixtral_8x7b), "mixtral-8x7b", ""),
                                          *model_of(Json::parse(deepseek_v3), "deepseek-v3", ""), bert()};
    models[0].sequence_length = 8192;
    return models;
}

}  // namespace

std::optional<DescribedModel> described_model(const std::string& name) {
    for (DescribedModel& model : named_models())
        if (model.name == name) return std::move(model);
    const std::filesystem::path file = std::filesystem::path(name) / "config.json";
    std::error_code error;
    if (!std::filesystem::is_regular_file(file, error)) return std::nullopt;
    std::optional<DescribedModel> model =
        model_of(Json::parse(read_file(file), nullptr, false), name, file.string());
    // A published one has the length of its name.
    for (const DescribedModel& named : named_models())
        if (model && model->parameters == named.parameters) model->sequence_length = named.sequence_length;
    return model;
}

}  // namespace llmc
