#include "llmc/train/precision.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "llmc/core/error.h"

namespace llmc {

namespace {

struct Level {
    std::string_view name, dtype;
    bool tf32 = false;
    std::string_view fp8 = "none", master = "fp32";
};
constexpr std::array levels = {Level{"fp32", "fp32"},
                               Level{"tf32", "fp32", true},
                               Level{"bf16", "bf16"},
                               Level{"fp16", "fp16"},
                               Level{"te-fp8", "bf16", false, "delayed"},
                               Level{"bf16-stochastic", "bf16", false, "none", "none"}};

constexpr std::array settings = {"dtype", "tf32", "fp8", "master-dtype", "moments-dtype", "gradient-dtype"};

}  // namespace

void take_precision(Options& o) {
    if (o.precision.empty()) return;
    const auto* const level = std::ranges::find(levels, o.precision, &Level::name);
    check(level != levels.end(), "--precision is one of its levels");
    // A setting in a file does not stand against a level on the command line.
    const bool is_typed = o.given.contains("precision");
    const auto set = [&](const char* name, auto& value, const auto& of_level) {
        if (o.given.contains(name) || (!is_typed && o.lines.contains(name))) return;
        value = of_level;
        o.of_precision.insert(name);
    };
    set("dtype", o.dtype, level->dtype);
    set("tf32", o.tf32, level->tf32);
    set("fp8", o.fp8, level->fp8);
    set("master-dtype", o.master_dtype, level->master);
    set("moments-dtype", o.moments_dtype, "fp32");
    set("gradient-dtype", o.gradient_dtype, "fp32");
}

std::string precision_text(const Options& o) {
    if (o.precision.empty()) return "";
    std::string text = o.precision;
    for (const char* name : settings) {
        if (o.of_precision.contains(name)) continue;
        const std::string value = name == std::string_view("dtype")           ? o.dtype
                                  : name == std::string_view("tf32")          ? (o.tf32 ? "true" : "false")
                                  : name == std::string_view("fp8")           ? o.fp8
                                  : name == std::string_view("master-dtype")  ? o.master_dtype
                                  : name == std::string_view("moments-dtype") ? o.moments_dtype
                                                                              : o.gradient_dtype;
        text += fmt::format(", but --{} {} as given", name, value);
    }
    return text;
}

}  // namespace llmc
