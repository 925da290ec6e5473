// Tables of the lab's programs: columns as wide as their longest cell, numbers to the right.
#pragma once

#include <string>
#include <vector>

namespace lab {

// What a launch takes of a multiprocessor.
struct Resources {
    std::string kernel;
    int registers = 0;     // a thread
    int shared_bytes = 0;  // a block, static and dynamic
    double occupancy = 0;  // threads that run at a time, of those the multiprocessor has places for
    int local_bytes = 0;   // stack and spills, a thread
};

class Table {
  public:
    // Columns without a title are text, the others numbers but the first.
    explicit Table(std::vector<std::string> titles) : titles_(std::move(titles)) {}
    void row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
    void print() const;

  private:
    std::vector<std::string> titles_;
    std::vector<std::vector<std::string>> rows_;
};

}  // namespace lab
