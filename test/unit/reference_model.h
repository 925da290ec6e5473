// The models of test/reference, which test/make_references.py makes: model_NAME.weights.safetensors, and
// model_NAME.expected.safetensors with PyTorch's results.
#pragma once

#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include "llmc/io/safetensors.h"
#include "llmc/model/model.h"
#include "llmc/train/options.h"

namespace llmc {

inline std::filesystem::path reference_file(const std::string& name, const std::string& kind) {
    return std::filesystem::path(__FILE__).parent_path() / "../reference" /
           ("model_" + name + "." + kind + ".safetensors");
}

// The model, which the metadata describes by options of the program.
inline Model reference_model(const std::string& name) {
    const SafetensorsReader expected(reference_file(name, "expected"));
    std::istringstream text(expected.metadata().at("options"));
    std::vector<std::string> words{"train_gpt"};
    for (std::string word; text >> word;) words.push_back(word);
    std::vector<const char*> arguments;
    for (const std::string& word : words) arguments.push_back(word.c_str());
    std::string help;
    return parse_options(static_cast<int>(arguments.size()), arguments.data(), help).value().make_model();
}

}  // namespace llmc
