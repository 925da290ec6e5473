// Configuration files of other programs, in JSON or YAML, as one tree.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace llmc {

// The tree of a file, whose top level is an object. A name that ends in .json, .yaml or .yml tells the format; else it
// is JSON if the text begins with {. Plain words of YAML are null, true, false and numbers as in YAML 1.1: "no" is
// false. UserError in one line for another file, for a key that is given twice, and for more values or levels than
// configurations have.
nlohmann::ordered_json read_config_tree(const std::string& file);

}  // namespace llmc
