#include "llmc/planner/described_models.h"

#include <algorithm>
#include <array>

namespace llmc {

namespace {

using Count = std::int64_t;

// Mixtral 8x7B (config.json of mistralai/Mixtral-8x7B-v0.1): each token uses two of eight experts.
constexpr Count mixtral(Count experts) {
    constexpr Count V = 32000, C = 4096, L = 32, H = 32, K = 8, D = 128, F = 14336, all_experts = 8;
    const Count attention = C * (H + 2 * K) * D + H * D * C,
                layer = attention + C * all_experts + experts * 3 * C * F;
    return 2 * V * C + C + L * (layer + 2 * C);
}

// DeepSeek-V3 (config.json of deepseek-ai/DeepSeek-V3, without the layer that predicts a second token): latent
// attention, three dense layers, and 58 layers of which a token uses eight routed experts and the shared one.
constexpr Count deepseek_v3(Count routed) {
    constexpr Count V = 129280, C = 7168, L = 61, H = 128, query_rank = 1536, key_rank = 512, nope = 128,
                    rope = 64, value = 128;
    constexpr Count attention = C * query_rank + query_rank + query_rank * H * (nope + rope) +
                                C * (key_rank + rope) + key_rank + key_rank * H * (nope + value) +
                                H * value * C;
    constexpr Count dense_layers = 3, dense = 3 * C * 18432, expert = 3 * C * 2048, router = C * 256 + 256;
    return 2 * V * C + C + L * (attention + 2 * C) + dense_layers * dense +
           (L - dense_layers) * (router + (routed + 1) * expert);
}

// BERT base, cased (config.json of google-bert/bert-base-cased), with its pooler and without a head.
constexpr Count bert() {
    constexpr Count V = 28996, C = 768, L = 12, F = 3072, positions = 512, types = 2, norm = 2 * C;
    constexpr Count layer = 4 * (C * C + C) + norm + C * F + F + F * C + C + norm;
    return (V + positions + types) * C + norm + L * layer + C * C + C;
}

constexpr std::array models = {
    DescribedModel{"mixtral-8x7b", "32 layers, 32 heads and 8 of keys, 4096 channels, 2 of 8 experts",
                   mixtral(8), mixtral(2), Count{32000} * 4096, 8192, 32, 4096, 3.0 * 32 * 32 * (128 + 128),
                   0},
    DescribedModel{
        "deepseek-v3",
        "61 layers, 128 heads of latent attention, 7168 channels, 8 of 256 experts and a shared one",
        deepseek_v3(256), deepseek_v3(8), Count{129280} * 7168, 4096, 61, 7168, 3.0 * 61 * 128 * (192 + 128),
        0},
    // Position and type ids: int64 (1, 512) each.
    DescribedModel{"bert-base-cased", "12 layers, 12 heads, 768 channels, tokens see all others", bert(),
                   bert(), Count{28996 + 512 + 2} * 768, 512, 12, 768, 2 * 3.0 * 12 * 12 * (64 + 64),
                   Count{2} * 512 * 8}};

}  // namespace

std::span<const DescribedModel> described_models() { return models; }

const DescribedModel* described_model(std::string_view name) {
    const auto* const found = std::ranges::find(models, name, &DescribedModel::name);
    return found == models.end() ? nullptr : found;
}

}  // namespace llmc
