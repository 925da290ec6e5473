// Standard input, output and error: open in every process, and fit for a terminal that several processes
// share.
#pragma once

#include <string_view>

namespace llmc {

// Opens /dev/null for each of standard input, output and error that is closed. Otherwise a file opened later
// could get its descriptor and receive messages. Writing to a closed stream still fails. Call this before
// anything else.
void fill_standard_streams();

// Erases the line of a terminal in which the cursor stands.
inline constexpr std::string_view erase_line = "\r\x1b[K";

// The text to write to `file`, a descriptor, before a line. On a terminal that can do so, it erases a
// progress line that another process may have left. Otherwise it is empty.
std::string_view line_start(int file);

// Writes whole lines to standard error in a single write, so that lines of several processes do not mix. A
// failure is ignored: the terminal may be closed, and nobody is left to be told.
void write_error(std::string_view lines);

}  // namespace llmc
