#include "llmc/io/tensor_names.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "llmc/core/error.h"
#include "llmc/io/safetensors.h"

namespace llmc {

namespace {

struct Wrapper {
    std::string_view prefix, name;
};
constexpr std::array wrappers = {Wrapper{"_orig_mod.", "torch.compile"}, Wrapper{"module.", "DataParallel"}};

}  // namespace

TensorNames::TensorNames(const std::filesystem::path& path, std::span<const std::string> names,
                         const std::string& prefix)
    : path_(path.string()), wrapper_prefix_(find_wrapper_prefix(names)) {
    for (const std::string& full : names) {
        std::string_view name = std::string_view(full).substr(wrapper_prefix_.size());
        if (name.starts_with(prefix)) name.remove_prefix(prefix.size());
        const auto [other, is_new] = in_file_.emplace(name, full);
        if (!is_new) {
            user_error("{}: {} and {} are both the model's {}; remove one of them from the file", path_,
                       in_quotes(other->second), in_quotes(full), in_quotes(other->first));
        }
    }
}

// A model may have several wrappers, each with its prefix.
std::string TensorNames::find_wrapper_prefix(std::span<const std::string> names) const {
    std::string found;
    for (bool found_more = !names.empty(); found_more;) {
        found_more = false;
        for (const Wrapper& wrapper : wrappers) {
            const std::string longer = found + std::string(wrapper.prefix);
            const auto has_it = [&](const std::string& name) { return name.starts_with(longer); };
            const auto with = std::ranges::find_if(names, has_it);
            if (with == names.end()) continue;
            const auto without = std::ranges::find_if_not(names, has_it);
            if (without != names.end()) {
                user_error(
                    "{}: {} begins with {}, as {} names tensors, but {} does not; remove {} from the names",
                    path_, in_quotes(*with), longer, wrapper.name, in_quotes(*without), longer);
            }
            found = longer;
            found_more = true;
        }
    }
    return found;
}

std::optional<std::string> TensorNames::in_file(std::string_view name) const {
    const auto found = in_file_.find(name);
    return found == in_file_.end() ? std::nullopt : std::optional(found->second);
}

std::string TensorNames::note() const {
    if (wrapper_prefix_.empty()) return "";
    return fmt::format("all names in {} begin with {}, a prefix of PyTorch's wrappers, which is left out",
                       path_, wrapper_prefix_);
}

}  // namespace llmc
