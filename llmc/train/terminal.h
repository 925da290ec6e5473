// Standard output as a terminal, with colours and a status line. The status line stays at the bottom while
// lines are printed above it. A file, a pipe or a simple terminal gets plain text only.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace llmc {

enum class Style { plain, heading, result, faint };

class Terminal {
  public:
    // Opens standard output's terminal. Under mpirun, it opens mpirun's own: the pipes between mpirun and its
    // processes look like terminals even if mpirun's output is a file. NO_COLOR (if not empty) and TERM=dumb
    // are respected.
    Terminal();
    // Removes the status line.
    ~Terminal();
    Terminal(const Terminal&) = delete;
    Terminal& operator=(const Terminal&) = delete;

    // The errno of the first failed print; 0 if all succeeded.
    int failure() const { return failure_; }

    // Whether the terminal can show a status line.
    bool has_status() const { return file_ >= 0; }
    bool has_colours() const { return colours_; }
    // The width of the terminal, or 100.
    int columns() const;

    // Prints the text with the status line below it, in place of the old status line. The status line is cut
    // to the terminal's width. An empty one removes it.
    void print(std::string_view text, std::string_view status);
    // The bytes that write a line of text over the status line, for a caller that cannot call print.
    std::string over_status(std::string_view text) const;
    // The text, in colour if the terminal has colours.
    std::string styled(Style style, std::string_view text) const;

  private:
    int file_ = -1;  // the terminal
    bool colours_ = false;
    std::string status_;
    int failure_ = 0;
};

// The text in lines of at most `columns` characters, broken at spaces. A longer word has a line of its own.
std::vector<std::string> wrapped(std::string_view text, std::size_t columns);

}  // namespace llmc
