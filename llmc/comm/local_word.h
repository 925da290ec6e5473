// What several processes find wrong before they can talk to one another, said by one of them.
#pragma once

#include <optional>
#include <string>

namespace llmc {

// Prints the text on standard error, unless another process of the same parent (a launcher, a shell) on this machine
// has printed the same two seconds ago at most. Returns as soon as so many others have come to say it, or, where that
// is not known or fewer come, after those two seconds.
void say_once_here(const std::string& text, std::optional<int> others);

}  // namespace llmc
