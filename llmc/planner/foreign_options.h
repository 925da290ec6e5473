// `plan --from FILE`: the options that a configuration of another program gives, in the command line.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace llmc {

struct ForeignOptions {
    std::vector<std::string> arguments;                      // with the file's options in the place of --from
    std::vector<std::string> notes;                          // what was taken from the file, and what not
    std::map<std::string, std::string, std::less<>> places;  // "FILE: key" of each option that the file gives

    // An error about such an option, with the place of its key before it.
    std::string with_place(std::string_view error) const;
};

// Options of the command line win over those of the file. Without --from, the arguments themselves. UserError for a
// wrong file, or a wrong value in it.
ForeignOptions with_foreign_options(std::vector<std::string> arguments);

}  // namespace llmc
