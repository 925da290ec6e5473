// What the program says while it runs. Rank 0 speaks alone; errors go to standard error (train_gpt.cu).
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/io/metrics.h"
#include "llmc/train/terminal.h"

namespace llmc {

using Rows = std::vector<std::pair<std::string, std::string>>;  // names and values

class Console {
  public:
    explicit Console(bool speaks) : speaks_(speaks) {}

    void header(std::string_view title, const Rows& rows);
    // Before the first of the steps first ... total.
    void begin(std::int64_t first, std::int64_t total);
    // A line a step; on a terminal also the progress at the bottom.
    void step(const StepMetrics& metrics);
    void validation(std::int64_t step, double loss);
    void sample(std::int64_t step, std::string_view text);
    // After the last step.
    void summary(const Rows& rows);
    void note(std::string_view text);
    void text(std::string_view text);

  private:
    void print(std::string_view text);
    void print_rows(const Rows& rows);

    bool speaks_;
    Terminal terminal_;
    std::int64_t first_ = 1, total_ = 0;
    std::int64_t steps_since_heading_ = 0;
    std::chrono::steady_clock::time_point start_;
};

// The progress line: "[=======>      ]  29%  350/1,200  0:21 passed, 0:52 left", at most `columns` wide.
// `done` of `total` steps took `seconds`; those before `first` were done by an earlier run.
std::string progress_line(std::int64_t first, std::int64_t done, std::int64_t total, double seconds,
                          int columns);

}  // namespace llmc
