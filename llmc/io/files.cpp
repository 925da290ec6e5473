#include "llmc/io/files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>
#include <xxhash.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <system_error>
#include <vector>

#include "llmc/core/error.h"

namespace llmc {

namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const char* what, const fs::path& path, int reason) {
    user_error("cannot {} {}: {}", what, path.string(), std::strerror(reason));
}

struct Descriptor {
    Descriptor(const char* what, const fs::path& path, int flags)
        : value(open(path.c_str(), flags | O_CLOEXEC, 0644)) {
        if (value < 0) fail(what, path, errno);
    }
    ~Descriptor() { close(value); }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    int value;
};

}  // namespace

void write_file(const fs::path& path, std::string_view text) {
    const Descriptor file("write", path, O_WRONLY | O_CREAT | O_TRUNC);
    while (!text.empty()) {
        const ssize_t written = write(file.value, text.data(), text.size());
        if (written < 0) fail("write", path, errno);
        text.remove_prefix(static_cast<std::size_t>(written));
    }
    if (fsync(file.value) != 0) fail("write", path, errno);
}

std::string read_file(const fs::path& path) {
    const Descriptor file("read", path, O_RDONLY);
    std::string text;
    std::vector<char> buffer(1 << 16);
    for (;;) {
        const ssize_t count = read(file.value, buffer.data(), buffer.size());
        if (count < 0) fail("read", path, errno);
        if (count == 0) return text;
        text.append(buffer.data(), static_cast<std::size_t>(count));
    }
}

void sync_directory(const fs::path& path) {
    const Descriptor directory("sync", path.empty() ? fs::path(".") : path, O_RDONLY | O_DIRECTORY);
    if (fsync(directory.value) != 0) fail("sync", path, errno);
}

std::string checksum(const fs::path& path) {
    const Descriptor file("read", path, O_RDONLY);
    const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(), XXH3_freeState);
    XXH3_128bits_reset(state.get());
    std::vector<char> buffer(1 << 20);
    for (;;) {
        const ssize_t count = read(file.value, buffer.data(), buffer.size());
        if (count < 0) fail("read", path, errno);
        if (count == 0) break;
        XXH3_128bits_update(state.get(), buffer.data(), static_cast<std::size_t>(count));
    }
    const XXH128_hash_t hash = XXH3_128bits_digest(state.get());
    return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

void make_directory(const fs::path& path) {
    std::error_code error;
    fs::create_directories(path, error);
    if (error) fail("create", path, error.value());
}

void replace_directory(const fs::path& from, const fs::path& to) {
    std::error_code error;
    if (fs::exists(to)) {
        // The two names change places in one act; `from` is then the old one.
        if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) {
            fs::remove_all(from, error);
            return;
        }
        // Not every file system can.
        fs::remove_all(to, error);
        if (error) fail("replace", to, error.value());
    }
    fs::rename(from, to, error);
    if (error) fail("rename", from, error.value());
}

}  // namespace llmc
