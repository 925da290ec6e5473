// What the options of a run say together: what one that was not given follows from, and what is out of range.
#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "llmc/train/options.h"

namespace llmc {

// A setting that says something only where another one has some values.
struct DependentSetting {
    std::string_view name, on;
    std::string_view
        given;  // as it was given where it says something: its name, and its value if there is just one
    std::string_view purpose;                         // "is for --zero-stage 3, which gathers parameters"
    std::function<bool(const Options&)> has_meaning;  // with the other one's value
    std::function<bool(const Options&)> is_given;
    std::function<void(Options&)> drop;
};
std::vector<DependentSetting> dependent_settings();

// The values of settings that were not given, but for those that wait for the device and the plan.
void resolve(Options& options);
// UserError for a value that is out of its range, or does not go with another. Of resolved options.
void check_ranges(const Options& options);

}  // namespace llmc
