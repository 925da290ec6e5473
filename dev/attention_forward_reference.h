// A row of attention in double, for the labs of attention forward, with the magnitudes of the terms of its
// sums. The labs derive the error bounds of their kernels from these.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace lab {

// The window of a shape of the lab, for kernels: 0 hides nothing, like one of `rows` keys.
inline int window_of(std::int64_t window, std::int64_t rows) {
    return static_cast<int>(window == 0 ? rows : std::min(window, rows));
}

// One query's attention in a head, over the keys that it sees.
class AttentionRow {
  public:
    // query(c) and key(j, c) return channel c < columns of the query and of key j < keys.
    template <class Query, class Key>
    AttentionRow(int keys, int columns, Query query, Key key) {
        const double scale = 1 / std::sqrt(static_cast<double>(columns));
        for (int j = 0; j < keys; ++j) {
            double score = 0, size = 0;
            for (int c = 0; c < columns; ++c) {
                const double term = scale * query(c) * key(j, c);
                score += term;
                size += std::fabs(term);
            }
            powers_.push_back(score);
            greatest_ = std::max(greatest_, score);
            largest_size_ = std::max(largest_size_, size);
        }
        for (double& s : powers_) sum_ += s = std::exp(s - greatest_);
    }

    double log_sum_exp() const { return greatest_ + std::log(sum_); }
    // The largest sum, over the scores, of the magnitudes of a score's terms.
    double largest_size() const { return largest_size_; }

    struct Output {
        double value = 0, size = 0;  // sums of terms, and of their magnitudes
    };
    // value(j) returns a channel of the value of key j.
    template <class Value>
    Output output(Value value) const {
        Output out;
        for (std::size_t j = 0; j < powers_.size(); ++j) {
            const double v = value(static_cast<int>(j)), weight = powers_[j] / sum_;
            out.value += weight * v;
            out.size += weight * std::fabs(v);
        }
        return out;
    }

  private:
    std::vector<double> powers_;  // exp(score - the greatest score)
    double greatest_ = -HUGE_VAL, sum_ = 0, largest_size_ = 0;
};

}  // namespace lab
