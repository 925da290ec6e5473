// What a person sees: what will run, a line a step, validations and samples, and a summary. Only rank 0 has a
// console that speaks; errors do not go through it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/io/metrics.h"

namespace llmc {

class Console {
  public:
    explicit Console(bool speaks) : speaks_(speaks) {}

    // A title and aligned rows of "name  text".
    void header(std::string_view title, const std::vector<std::pair<std::string, std::string>>& rows) const;
    void step(const StepMetrics& metrics, std::int64_t total_steps);
    void validation(std::int64_t step, double loss);
    void sample(std::int64_t step, std::string_view text) const;
    void note(std::string_view text) const;
    void text(std::string_view text) const;

  private:
    bool speaks_;
    std::int64_t steps_since_heading_ = 0;
};

}  // namespace llmc
