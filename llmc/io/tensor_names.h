// The names of the tensors in a weight file, which differ from a model's names by prefixes. Hugging Face's files of
// one model begin with "transformer." or do not. PyTorch's wrappers put their own prefix before every name.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace llmc {

class TensorNames {
  public:
    // `prefix` is the one that names may have or lack. UserError if two tensors have one name in the model, since
    // either of them could be meant, and if a wrapper's prefix is before some of the names only.
    TensorNames(const std::filesystem::path& path, std::span<const std::string> names,
                const std::string& prefix);

    // The name in the file of a tensor of the model. Empty if the file has no such tensor.
    std::optional<std::string> in_file(std::string_view name) const;
    bool contains(std::string_view name) const { return in_file_.contains(name); }
    // The file's names by the model's names, sorted by the latter.
    const std::map<std::string, std::string, std::less<>>& all() const { return in_file_; }

    // A note for the user about the names; empty if there is nothing to say.
    std::string note() const;

  private:
    std::string find_wrapper_prefix(std::span<const std::string> names) const;

    std::string path_;
    std::string wrapper_prefix_;  // before all names
    std::map<std::string, std::string, std::less<>> in_file_;
};

}  // namespace llmc
