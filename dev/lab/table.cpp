// Implements table.h.
#include "dev/lab/table.h"

#include <fmt/core.h>

#include <algorithm>

namespace lab {

void Table::print() const {
    std::vector<std::size_t> widths;
    for (const std::string& title : titles_) widths.push_back(title.size());
    for (const auto& row : rows_) {
        for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
    }
    const auto print_row = [&](const std::vector<std::string>& row) {
        std::string line;
        for (std::size_t i = 0; i < row.size(); ++i) {
            const bool is_text = i == 0 || titles_[i].empty();
            line += fmt::format(fmt::runtime(is_text ? "{:<{}}  " : "{:>{}}  "), row[i], widths[i]);
        }
        line.erase(line.find_last_not_of(' ') + 1);
        fmt::print("  {}\n", line);
    };
    print_row(titles_);
    for (const auto& row : rows_) print_row(row);
}

}  // namespace lab
