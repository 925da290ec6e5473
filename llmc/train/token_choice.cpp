#include "llmc/train/token_choice.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <vector>

namespace llmc {

namespace {

// Tokens in the order of their logits, the largest first, sorted only as far as needed. Among equal logits
// the lower token comes first, so that the choice does not depend on the sorting algorithm.
class Ranking {
  public:
    explicit Ranking(std::span<const float> logits) : logits_(logits), tokens_(logits.size()) {
        std::iota(tokens_.begin(), tokens_.end(), 0);
    }

    void sort_first(std::size_t count) {
        const auto end = tokens_.begin() + static_cast<std::ptrdiff_t>(std::min(count, tokens_.size()));
        std::partial_sort(tokens_.begin() + static_cast<std::ptrdiff_t>(sorted_), end, tokens_.end(),
                          [&](std::int32_t a, std::int32_t b) {
                              return logit(a) != logit(b) ? logit(a) > logit(b) : a < b;
                          });
        sorted_ = std::max(sorted_, static_cast<std::size_t>(end - tokens_.begin()));
    }
    void keep_first(std::size_t count) { tokens_.resize(std::min(count, tokens_.size())); }

    std::size_t sorted() const { return sorted_; }
    const std::vector<std::int32_t>& tokens() const { return tokens_; }
    float logit(std::int32_t token) const { return logits_[static_cast<std::size_t>(token)]; }

  private:
    std::span<const float> logits_;
    std::vector<std::int32_t> tokens_;
    std::size_t sorted_ = 0;
};

}  // namespace

std::int32_t sample_token(std::span<const float> logits, const SamplerOptions& options, double uniform) {
    const auto likeliest = std::max_element(logits.begin(), logits.end());
    if (options.temperature == 0) return static_cast<std::int32_t>(likeliest - logits.begin());

    Ranking ranking(logits);
    if (options.top_k > 0 && options.top_k < std::ssize(logits)) {
        ranking.sort_first(static_cast<std::size_t>(options.top_k));
        ranking.keep_first(static_cast<std::size_t>(options.top_k));
    }
    const auto weight = [&](std::int32_t token) {
        return std::exp((static_cast<double>(ranking.logit(token)) - static_cast<double>(*likeliest)) /
                        options.temperature);
    };
    if (options.top_p < 1) {
        double all = 0, reached = 0;
        for (const std::int32_t token : ranking.tokens()) all += weight(token);
        std::size_t count = 0;
        while (count < ranking.tokens().size() && (count == 0 || reached < options.top_p * all)) {
            // Usually only a few tokens of a large vocabulary are needed.
            if (count == ranking.sorted()) ranking.sort_first(std::max<std::size_t>(64, 4 * count));
            reached += weight(ranking.tokens()[count++]);
        }
        ranking.keep_first(count);
    }

    std::vector<double> cumulative;
    double total = 0;
    for (const std::int32_t token : ranking.tokens()) cumulative.push_back(total += weight(token));
    const auto chosen = std::upper_bound(cumulative.begin(), cumulative.end(), uniform * total);
    const auto index = std::min<std::ptrdiff_t>(chosen - cumulative.begin(), std::ssize(cumulative) - 1);
    return ranking.tokens()[static_cast<std::size_t>(index)];
}

}  // namespace llmc
