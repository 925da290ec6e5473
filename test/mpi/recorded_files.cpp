#include "recorded_files.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace {

namespace fs = std::filesystem;
using llmc::test::FileCall;
using Kind = FileCall::Kind;

// One recorder for the functions below, which take the place of the C library's.
struct Recording {
    bool is_on = false, can_exchange = true;
    std::string folder;
    std::vector<FileCall> calls;
    std::map<std::string, std::uint64_t> read;
    std::function<bool(const std::string&)> fails;
};
Recording recording;

// The path below the folder; nothing for others.
std::optional<std::string> below(const std::string& path) {
    if (!recording.is_on || !path.starts_with(recording.folder + "/")) return std::nullopt;
    return path.substr(recording.folder.size() + 1);
}
std::optional<std::string> below(int directory, const char* path) {
    if (!recording.is_on) return std::nullopt;
    if (path[0] == '/' || directory == AT_FDCWD) return below(std::string(path));
    std::error_code error;
    return below(fs::read_symlink("/proc/self/fd/" + std::to_string(directory), error).string() + "/" + path);
}
std::optional<std::string> below(int descriptor) {
    if (!recording.is_on) return std::nullopt;
    std::error_code error;
    const std::string path = fs::read_symlink("/proc/self/fd/" + std::to_string(descriptor), error).string();
    if (path == recording.folder) return "";
    return below(path);
}

void record(Kind kind, const std::string& path, const std::string& more = "") {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    recording.calls.push_back(
        {kind, std::chrono::duration_cast<std::chrono::nanoseconds>(now).count(), path, more});
}

}  // namespace

// (The C library's headers have reserved names for the parameters.)
// NOLINTBEGIN(readability-inconsistent-declaration-parameter-name)
extern "C" {

int open(const char* path, int flags, ...) {
    mode_t mode = 0;
    if ((flags & O_CREAT) != 0) {
        va_list arguments;
        va_start(arguments, flags);
        mode = va_arg(arguments, mode_t);
        va_end(arguments);
    }
    const auto file = static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, flags, mode));
    if (const auto name = below(AT_FDCWD, path); name && file >= 0 && (flags & O_CREAT) != 0)
        record(Kind::create, *name);
    return file;
}

ssize_t write(int file, const void* bytes, size_t count) {
    const auto name = below(file);
    if (name && recording.fails && recording.fails(*name)) {
        errno = ENOSPC;
        return -1;
    }
    const ssize_t written = syscall(SYS_write, file, bytes, count);
    if (name && written > 0)
        record(Kind::write, *name, {static_cast<const char*>(bytes), static_cast<std::size_t>(written)});
    return written;
}

ssize_t pread(int file, void* bytes, size_t count, off_t position) {
    const ssize_t read = syscall(SYS_pread64, file, bytes, count, position);
    if (const auto name = below(file); name && read > 0)
        recording.read[*name] += static_cast<std::uint64_t>(read);
    return read;
}

int fsync(int file) {
    if (const auto name = below(file)) record(Kind::sync, *name);
    return static_cast<int>(syscall(SYS_fsync, file));
}

int mkdir(const char* path, mode_t mode) noexcept {
    const auto result = static_cast<int>(syscall(SYS_mkdirat, AT_FDCWD, path, mode));
    if (const auto name = below(AT_FDCWD, path); name && result == 0) record(Kind::make_directory, *name);
    return result;
}

int rename(const char* from, const char* to) noexcept {
    const auto result = static_cast<int>(syscall(SYS_renameat, AT_FDCWD, from, AT_FDCWD, to));
    if (const auto name = below(AT_FDCWD, from); name && result == 0)
        record(Kind::rename, *name, below(AT_FDCWD, to).value());
    return result;
}

int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned int flags) noexcept {
    if (!recording.can_exchange) {
        errno = EINVAL;
        return -1;
    }
    const auto result = static_cast<int>(syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
    if (const auto name = below(from_folder, from); name && result == 0)
        record(Kind::exchange, *name, below(to_folder, to).value());
    return result;
}

int unlinkat(int folder, const char* path, int flags) noexcept {
    const auto name = below(folder, path);
    const auto result = static_cast<int>(syscall(SYS_unlinkat, folder, path, flags));
    if (name && result == 0) record(Kind::remove, *name);
    return result;
}
int unlink(const char* path) noexcept { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char* path) noexcept { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char* path) noexcept {
    struct stat status {};
    if (lstat(path, &status) != 0) return -1;
    return S_ISDIR(status.st_mode) ? rmdir(path) : unlink(path);
}
}
// NOLINTEND(readability-inconsistent-declaration-parameter-name)

namespace llmc::test {

FileRecorder::FileRecorder(const fs::path& folder) {
    recording = {.is_on = true,
                 .can_exchange = recording.can_exchange,
                 .folder = fs::canonical(folder).string(),
                 .calls = {},
                 .read = {},
                 .fails = std::move(recording.fails)};
}
FileRecorder::~FileRecorder() { recording.is_on = false; }
const std::vector<FileCall>& FileRecorder::calls() const { return recording.calls; }
const std::map<std::string, std::uint64_t>& FileRecorder::read() const { return recording.read; }

void let_names_be_exchanged(bool can) { recording.can_exchange = can; }
void let_writes_fail(std::function<bool(const std::string&)> fails) { recording.fails = std::move(fails); }

namespace {

struct Node {
    bool is_directory = false;
    std::string data, synced_data;
    std::map<std::string, std::shared_ptr<Node>> names, synced_names;
};

std::string text_of(const fs::path& file) {
    std::ifstream stream(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
}

std::shared_ptr<Node> tree_of(const fs::path& folder) {
    auto node = std::make_shared<Node>();
    node->is_directory = true;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
        auto& made = node->names[entry.path().filename().string()];
        if (entry.is_directory()) {
            made = tree_of(entry.path());
        } else {
            made = std::make_shared<Node>();
            made->data = made->synced_data = text_of(entry.path());
        }
    }
    node->synced_names = node->names;
    return node;
}

// The folder of a path, and the last name.
std::pair<Node*, std::string> place_of(Node& root, const std::string& path) {
    Node* folder = &root;
    const fs::path of = path;
    for (const fs::path& name : of.parent_path()) folder = folder->names.at(name.string()).get();
    return {folder, of.filename().string()};
}

Node& node_of(Node& root, const std::string& path) {
    if (path.empty()) return root;
    const auto [folder, name] = place_of(root, path);
    return *folder->names.at(name);
}

void apply(Node& root, const FileCall& call) {
    const auto [folder, name] = place_of(root, call.path);
    switch (call.kind) {
        case Kind::create: {
            auto& node = folder->names[name];
            if (!node) node = std::make_shared<Node>();
            node->data.clear();
            break;
        }
        case Kind::write:
            folder->names.at(name)->data += call.more;
            break;
        case Kind::sync: {
            Node& node = node_of(root, call.path);
            node.synced_data = node.data;
            node.synced_names = node.names;
            break;
        }
        case Kind::make_directory:
            folder->names[name] = std::make_shared<Node>();
            folder->names[name]->is_directory = true;
            break;
        case Kind::rename: {
            const auto [to, new_name] = place_of(root, call.more);
            to->names[new_name] = folder->names.at(name);
            folder->names.erase(name);
            break;
        }
        case Kind::exchange: {
            const auto [to, new_name] = place_of(root, call.more);
            std::swap(folder->names.at(name), to->names.at(new_name));
            break;
        }
        case Kind::remove:
            folder->names.erase(name);
            break;
    }
}

// The folders whose names are not all synced.
void find_unsynced(Node& node, const std::string& path, std::set<Node*>& seen,
                   std::vector<std::pair<Node*, std::string>>& found) {
    if (!node.is_directory || !seen.insert(&node).second) return;
    if (node.names != node.synced_names) found.emplace_back(&node, path.empty() ? "." : path);
    for (const auto* names : {&node.names, &node.synced_names})
        for (const auto& [name, inner] : *names) find_unsynced(*inner, path + "/" + name, seen, found);
}

void write_tree(const Node& node, const fs::path& folder, const std::set<const Node*>& without_names) {
    fs::create_directory(folder);
    for (const auto& [name, inner] : without_names.contains(&node) ? node.synced_names : node.names) {
        if (inner->is_directory) {
            write_tree(*inner, folder / name, without_names);
        } else {
            std::ofstream(folder / name, std::ios::binary) << inner->synced_data;
        }
    }
}

}  // namespace

void for_each_power_cut(const fs::path& before, const std::vector<FileCall>& calls, const fs::path& scratch,
                        const std::function<void(std::size_t, const std::string&)>& check) {
    const std::shared_ptr<Node> root = tree_of(before);
    for (std::size_t count = 0; count <= calls.size(); ++count) {
        if (count > 0) apply(*root, calls[count - 1]);
        std::set<Node*> seen;
        std::vector<std::pair<Node*, std::string>> unsynced;
        find_unsynced(*root, "", seen, unsynced);
        for (std::size_t choice = 0; choice < (std::size_t{1} << unsynced.size()); ++choice) {
            std::set<const Node*> without_names;
            std::string lost;
            for (std::size_t i = 0; i < unsynced.size(); ++i) {
                if ((choice >> i & 1) == 0) continue;
                without_names.insert(unsynced[i].first);
                lost += " " + unsynced[i].second;
            }
            fs::remove_all(scratch);
            write_tree(*root, scratch, without_names);
            check(count, lost.empty() ? " none" : lost);
        }
    }
}

}  // namespace llmc::test
