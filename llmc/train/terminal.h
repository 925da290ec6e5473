// Standard output as a person's terminal: colours, and a status line that stays at the bottom while lines are
// printed above it. Where standard output is a file, a pipe or a terminal that can do neither, there is plain
// text alone.
#pragma once

#include <string>
#include <string_view>

namespace llmc {

// Opens /dev/null for those of standard input, output and error that are closed, so that no file of the run is opened in
// their place and receives what is said there. Writing to them fails as before. Called first of all.
void fill_standard_streams();

enum class Style { plain, heading, result, faint };

class Terminal {
  public:
    // Standard output's terminal. Under mpirun that of mpirun itself: between it and its processes lie pipes that
    // look like terminals, whatever a person has put mpirun's output into. NO_COLOR (if not empty) and TERM=dumb
    // are heeded.
    Terminal();
    // The status line is gone afterwards.
    ~Terminal();
    Terminal(const Terminal&) = delete;
    Terminal& operator=(const Terminal&) = delete;

    // Why something could not be printed (errno); 0 if all was.
    int failure() const { return failure_; }

    // Whether there is a status line.
    bool has_status() const { return file_ >= 0; }
    bool has_colours() const { return colours_; }
    // The width to write for: the terminal's, or 100.
    int columns() const;

    // The text, with a status line below it, cut to the terminal's width, in place of the last one; an empty one
    // removes it.
    void print(std::string_view text, std::string_view status);
    // A line of text with what writes it over the status line, for who cannot call print.
    std::string over_status(std::string_view text) const;
    // The text in colour where there are colours.
    std::string styled(Style style, std::string_view text) const;

  private:
    int file_ = -1;  // the terminal
    bool colours_ = false;
    std::string status_;
    int failure_ = 0;
};

}  // namespace llmc
