// What several processes find wrong before they can talk to one another, said by one of them.
#pragma once

#include <string>

namespace llmc {

// Prints the text on standard error, unless another process of the same parent (a launcher, a shell) on this machine
// has printed the same half a second ago at most.
void say_once_here(const std::string& text);

}  // namespace llmc
