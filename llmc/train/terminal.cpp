#include "llmc/train/terminal.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "llmc/core/standard_streams.h"

namespace llmc {

namespace {

constexpr int default_columns = 100;

std::string_view environment(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

// A descriptor of standard output. Under mpirun, a descriptor of mpirun's standard output: mpirun is the
// parent process on its own machine. On other machines the parent is a daemon without a terminal.
int open_output() {
    if (environment("OMPI_COMM_WORLD_RANK").empty()) return dup(STDOUT_FILENO);
    return open(fmt::format("/proc/{}/fd/1", getppid()).c_str(), O_WRONLY | O_NOCTTY | O_CLOEXEC);
}

// 0 if the terminal does not tell its width.
int columns_of(int file) {
    winsize size{};
    return ioctl(file, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

void write(std::string_view text) { std::fwrite(text.data(), 1, text.size(), stdout); }

}  // namespace

Terminal::Terminal() {
    const std::string_view type = environment("TERM");
    if (type.empty() || type == "dumb") return;
    const int output = open_output();
    if (output < 0) return;
    if (isatty(output) == 1) {
        file_ = output;
        colours_ = environment("NO_COLOR").empty();
    } else {
        close(output);
    }
}

Terminal::~Terminal() {
    if (file_ < 0) return;
    print("", "");
    close(file_);
}

int Terminal::columns() const {
    const int columns = file_ >= 0 ? columns_of(file_) : 0;
    return columns > 0 ? columns : default_columns;
}

void Terminal::print(std::string_view text, std::string_view status) {
    errno = 0;
    if (!status_.empty()) write(erase_line);
    write(text);
    // A line that filled the last column would wrap, and a wrapped line cannot be erased.
    if (has_status()) status_ = status.substr(0, static_cast<std::size_t>(std::max(0, columns() - 1)));
    write(status_);
    const bool failed = std::fflush(stdout) != 0 || std::ferror(stdout) != 0;
    if (failed && failure_ == 0) failure_ = errno == 0 ? EIO : errno;
}

std::string Terminal::over_status(std::string_view text) const {
    return fmt::format("{}{}", has_status() ? erase_line : "", text);
}

std::string Terminal::styled(Style style, std::string_view text) const {
    if (!colours_ || style == Style::plain) return std::string(text);
    constexpr std::string_view bold = "1", green = "32", grey = "90";
    const std::string_view code = style == Style::heading ? bold : style == Style::result ? green : grey;
    return fmt::format("\x1b[{}m{}\x1b[0m", code, text);
}

std::vector<std::string> wrapped(std::string_view text, std::size_t columns) {
    std::vector<std::string> lines;
    while (text.size() > columns) {
        std::size_t cut = text.rfind(' ', columns);
        if (cut == std::string_view::npos) cut = text.find(' ');
        if (cut == std::string_view::npos) break;
        lines.emplace_back(text.substr(0, cut));
        text.remove_prefix(cut + 1);
    }
    lines.emplace_back(text);
    return lines;
}

}  // namespace llmc
