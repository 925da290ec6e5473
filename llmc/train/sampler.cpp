#include "llmc/train/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <vector>

namespace llmc {

std::int32_t sample_token(std::span<const float> logits, const SamplerOptions& options, double uniform) {
    const auto likeliest = std::max_element(logits.begin(), logits.end());
    if (options.temperature == 0) return static_cast<std::int32_t>(likeliest - logits.begin());

    std::vector<std::int32_t> tokens(logits.size());
    std::iota(tokens.begin(), tokens.end(), 0);
    const auto logit = [&](std::int32_t token) { return logits[static_cast<std::size_t>(token)]; };
    if (options.top_k > 0 && options.top_k < static_cast<std::int64_t>(tokens.size())) {
        // Of equal logits the lower token comes first, so that the choice does not hang on the sort.
        std::partial_sort(tokens.begin(), tokens.begin() + options.top_k, tokens.end(),
                          [&](std::int32_t a, std::int32_t b) {
                              return logit(a) != logit(b) ? logit(a) > logit(b) : a < b;
                          });
        tokens.resize(static_cast<std::size_t>(options.top_k));
    }

    std::vector<double> cumulative;
    double total = 0;
    for (const std::int32_t token : tokens) {
        total += std::exp((static_cast<double>(logit(token)) - static_cast<double>(*likeliest)) /
                          options.temperature);
        cumulative.push_back(total);
    }
    const auto chosen = std::upper_bound(cumulative.begin(), cumulative.end(), uniform * total);
    const auto index = std::min<std::ptrdiff_t>(chosen - cumulative.begin(), std::ssize(tokens) - 1);
    return tokens[static_cast<std::size_t>(index)];
}

}  // namespace llmc
