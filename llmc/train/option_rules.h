// Rules about options: defaults that depend on other options, ranges, and options that exclude each other.
#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "llmc/train/options.h"

namespace llmc {

// A setting that has an effect only with certain values of another setting.
struct DependentSetting {
    std::string_view name, on;  // this setting, and the one that it depends on
    std::string_view
        given;  // the setting as messages show it: its name, with the value if only one value has an effect
    std::string_view purpose;  // "needs --zero-stage 3, which gathers parameters"
    std::function<bool(const Options&)> has_effect;
    std::function<bool(const Options&)> differs_from_default;
    std::function<void(Options&)> drop;
};
std::vector<DependentSetting> dependent_settings();

// Sets the settings that were not given, except those that depend on the device or the plan.
void resolve(Options& options);
// Throws UserError for a value out of range, or one that conflicts with another. The options must be
// resolved.
void check_ranges(const Options& options);

}  // namespace llmc
