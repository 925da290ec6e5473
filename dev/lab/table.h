// Tables of the lab's programs: columns are as wide as their longest cell; numbers are aligned to the right.
#pragma once

#include <string>
#include <vector>

namespace lab {

// The resources of a multiprocessor that a launch uses.
struct Resources {
    std::string kernel;
    int registers = 0;     // per thread
    int shared_bytes = 0;  // per block, static and dynamic
    double occupancy = 0;  // resident threads as a fraction of the most that the multiprocessor can run
    int local_bytes = 0;   // stack and spills, per thread
};

class Table {
  public:
    // The first column and columns without a title are text; the others are numbers.
    explicit Table(std::vector<std::string> titles) : titles_(std::move(titles)) {}
    void row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
    void print() const;

  private:
    std::vector<std::string> titles_;
    std::vector<std::vector<std::string>> rows_;
};

}  // namespace lab
