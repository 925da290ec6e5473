#include "llmc/io/files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <system_error>
#include <utility>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/text.h"

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

// The kind of a file that is not regular, for messages.
std::string_view kind_of(fs::file_type type) {
    switch (type) {
        case fs::file_type::directory:
            return "a directory";
        case fs::file_type::fifo:
            return "a pipe";
        case fs::file_type::socket:
            return "a socket";
        default:
            return "a device";
    }
}

std::string hexadecimal(const XXH128_hash_t& hash) {
    return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

}  // namespace

OutputFile::OutputFile(const fs::path& path, const fs::path& named)
    : named_(named.empty() ? path : named),
      // Without O_NONBLOCK, opening a named pipe would wait for its reader.
      file_(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NONBLOCK | O_CLOEXEC, 0644)) {
    if (file_ < 0) fail("write", named_, errno);
}

OutputFile::~OutputFile() {
    if (file_ >= 0) ::close(file_);
}

void OutputFile::write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
        const ssize_t written = ::write(file_, bytes.data(), bytes.size());
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) fail("write", named_, errno);
        bytes = bytes.subspan(static_cast<std::size_t>(written));
    }
}

void OutputFile::sync() const {
    if (fsync(file_) != 0) fail("write", named_, errno);
}

void OutputFile::close() {
    if (::close(std::exchange(file_, -1)) != 0) fail("write", named_, errno);
}

InputFile::InputFile(const fs::path& path)
    // Without O_NONBLOCK, opening a named pipe would wait for its writer.
    : path_(path), file_(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC)) {
    if (file_ < 0) fail("open", path, errno);
    struct stat status {};
    if (fstat(file_, &status) != 0) {
        const int reason = errno;
        ::close(file_);
        fail("read", path, reason);
    }
    is_regular_ = S_ISREG(status.st_mode);
    bytes_ = static_cast<std::uint64_t>(status.st_size);
}

InputFile::~InputFile() { ::close(file_); }

void InputFile::read_at(std::uint64_t position, std::span<std::byte> out) const {
    while (!out.empty()) {
        const ssize_t count = pread(file_, out.data(), out.size(), static_cast<off_t>(position));
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) fail("read", path_, errno);
        if (count == 0) user_error("cannot read {}: it ends early, at byte {}", path_.string(), position);
        out = out.subspan(static_cast<std::size_t>(count));
        position += static_cast<std::uint64_t>(count);
    }
}

void write_file(const fs::path& path, std::string_view text) {
    OutputFile file(path);
    file.write(text);
    file.sync();
    file.close();
}

void replace_file(const fs::path& path, std::string_view text, std::string_view ending) {
    fs::path partial = path;
    partial += ending;
    std::error_code error;
    try {
        write_file(partial, text);
    } catch (const UserError&) {
        fs::remove(partial, error);
        throw;
    }
    fs::rename(partial, path, error);
    if (error) fail("write", path, error.value());
}

std::string read_file(const fs::path& path) {
    std::error_code error;
    const fs::file_type type = fs::status(path, error).type();
    if (fs::exists(fs::file_status(type)) && type != fs::file_type::regular &&
        type != fs::file_type::directory) {
        user_error("{} is {}; give a file", path.string(), kind_of(type));
    }
    const Descriptor file("read", path, O_RDONLY | O_NONBLOCK);
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
    return hexadecimal(XXH3_128bits_digest(state.get()));
}

std::string checksum_of_text(std::string_view text) {
    return hexadecimal(XXH3_128bits(text.data(), text.size()));
}

struct BlockChecksums::State {
    std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> hash{XXH3_createState(), XXH3_freeState};
};

BlockChecksums::BlockChecksums() : state_(std::make_unique<State>()) {
    XXH3_128bits_reset(state_->hash.get());
}
BlockChecksums::~BlockChecksums() = default;

void BlockChecksums::add(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
        const std::size_t count = std::min<std::uint64_t>(bytes.size(), checksum_block - in_block_);
        XXH3_128bits_update(state_->hash.get(), bytes.data(), count);
        bytes = bytes.subspan(count);
        in_block_ += count;
        if (in_block_ == checksum_block) end_block();
    }
}

void BlockChecksums::end_block() {
    blocks_.push_back(hexadecimal(XXH3_128bits_digest(state_->hash.get())));
    XXH3_128bits_reset(state_->hash.get());
    in_block_ = 0;
}

std::vector<std::string> BlockChecksums::finish() {
    if (in_block_ > 0) end_block();
    return std::move(blocks_);
}

namespace {

// The existing part of a path: the path itself, or its nearest existing parent.
fs::path existing_part(const fs::path& path) {
    std::error_code error;
    fs::path part = fs::absolute(path).lexically_normal();
    while (part.has_relative_path() && !fs::exists(fs::symlink_status(part, error)))
        part = part.parent_path();
    return part;
}

}  // namespace

fs::path plain_path(const fs::path& path) {
    fs::path whole = fs::absolute(path) / "";
    // The parent of what a link leads to is not the folder of the link.
    std::error_code ignored;
    if (std::ranges::find(whole, fs::path("..")) != whole.end())
        whole = fs::weakly_canonical(whole, ignored) / "";
    return whole.lexically_normal().parent_path();
}

fs::path link_target(const fs::path& path) {
    constexpr int most_links = 40;  // as in Linux
    std::error_code error;
    fs::path target = path;
    for (int links = 0; fs::is_symlink(target, error); ++links) {
        if (links == most_links) return path;
        const fs::path next = fs::read_symlink(target, error);
        target = target.parent_path() / next;  // an absolute `next` replaces all
    }
    return target;
}

void require_writable_directory(const fs::path& path) {
    std::error_code error;
    if (!fs::exists(fs::status(path, error)) && error && error != std::errc::no_such_file_or_directory &&
        error != std::errc::not_a_directory) {
        fail("write", path, error.value());  // too long a name, a link to itself
    }
    // Creating and removing a directory tests permissions, a read-only file system and a full disk.
    const FolderToken probe(path);
}

FolderToken::FolderToken(const fs::path& directory) {
    const fs::path named = directory.empty() ? fs::path(".") : directory, part = existing_part(named);
    std::string made = (part / ".train_gpt-XXXXXX").string();
    if (mkdtemp(made.data()) == nullptr) {
        const int reason = errno;
        if (reason == ENOTDIR)
            user_error("cannot write {}: {} is not a directory", named.string(), part.string());
        fail("create files in", part, reason);
    }
    path_ = made;
    place_ = path_.lexically_relative(plain_path(named));
}

FolderToken::~FolderToken() { rmdir(path_.c_str()); }

void require_writable_file(const fs::path& path) {
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    if (status.type() == fs::file_type::none) fail("write", path, error.value());  // a link to itself
    if (fs::exists(status)) {
        if (!fs::is_regular_file(status) && !fs::is_character_file(status))
            user_error("{} is {}; give the name of a file", path.string(), kind_of(status.type()));
        const Descriptor opened("write", path, O_WRONLY | O_NONBLOCK);
        if (!fs::is_regular_file(status)) return;
    }
    require_writable_directory(path.parent_path());
}

void require_replaceable_file(const fs::path& path) {
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    if (fs::exists(status) && !fs::is_directory(status) && !fs::is_regular_file(status)) {
        user_error("{} is not a regular file; give the name of a regular file", path.string());
    }
    if (!path.has_filename()) user_error("{} is a directory; give the name of a file", path.string());
    require_writable_file(path);
    fs::path partial = path;
    partial += ".partial";
    const fs::file_status in_the_way = fs::status(partial, error);
    if (fs::exists(in_the_way) && !fs::is_regular_file(in_the_way)) {
        user_error("{} is {}, but {} is first written under that name; remove it", partial.string(),
                   kind_of(in_the_way.type()), path.string());
    }
    require_writable_file(partial);
}

void require_space(const fs::path& path, std::uint64_t bytes, std::uint64_t checkpoint) {
    const fs::path part = existing_part(path);
    struct statvfs disk {};
    // Not every file system counts its blocks.
    if (statvfs(part.c_str(), &disk) != 0 || disk.f_blocks == 0) return;
    const std::uint64_t available = std::uint64_t{disk.f_bavail} * disk.f_frsize;
    if (bytes + checkpoint > available) {
        user_error("{} needs {} on a disk with {} left{}; make room, or write to another disk", path.string(),
                   human_bytes(bytes), human_bytes(available),
                   checkpoint == 0
                       ? ""
                       : fmt::format(", and the checkpoint needs {} of that", human_bytes(checkpoint)));
    }
}

bool on_one_disk(const fs::path& a, const fs::path& b) {
    struct stat one {
    }, other{};
    return stat(existing_part(a).c_str(), &one) == 0 && stat(existing_part(b).c_str(), &other) == 0 &&
           one.st_dev == other.st_dev;
}

void make_directory(const fs::path& path) {
    std::error_code error;
    fs::create_directories(path, error);
    if (error) fail("create", path, error.value());
}

void replace_directory(const fs::path& from, const fs::path& to) {
    std::error_code error;
    const fs::path parent = to.parent_path();
    if (fs::exists(to)) {
        // Exchanges the two names atomically; `from` is then the old directory.
        fs::path old = from;
        if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) != 0) {
            // Not every file system supports this. The old directory has another name until the new one is in its
            // place.
            old = to;
            old += replaced_suffix;
            fs::remove_all(old, error);
            fs::rename(to, old, error);
            if (error) fail("replace", to, error.value());
            fs::rename(from, to, error);
            if (error) fail("rename", from, error.value());
        }
        sync_directory(parent);
        fs::remove_all(old, error);
        return;
    }
    fs::rename(from, to, error);
    if (error) fail("rename", from, error.value());
    sync_directory(parent);
}

}  // namespace llmc
