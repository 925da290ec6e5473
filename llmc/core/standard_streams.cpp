#include "llmc/core/standard_streams.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace llmc {

void fill_standard_streams() {
    for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
        // open() takes the lowest free descriptor, which is this one.
        if (fcntl(stream, F_GETFD) < 0 && open("/dev/null", O_RDONLY) < 0) return;
    }
}

std::string_view line_start(int file) {
    const char* type = std::getenv("TERM");
    const bool is_simple = type == nullptr || *type == 0 || std::string_view(type) == "dumb";
    return !is_simple && isatty(file) == 1 ? erase_line : "";
}

void write_error(std::string_view lines) {
    std::fwrite(lines.data(), 1, lines.size(), stderr);
    std::fflush(stderr);
}

}  // namespace llmc
