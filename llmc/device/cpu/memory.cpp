#include "llmc/device/cpu/memory.h"

#include <algorithm>
#include <fstream>
#include <string>

namespace llmc::cpu {

namespace {

// The number after `name` at the start of a line of the file. Without a name, the number at the start of the
// file.
std::optional<std::size_t> number_in(const std::string& path, const std::string& name = {}) {
    std::ifstream file(path);
    std::string word;
    while (!name.empty() && file >> word && word != name) std::getline(file, word);
    std::size_t number = 0;
    if (file >> number) return number;
    return std::nullopt;
}

// The bytes that a control group with these files may still use. A group without a limit has "max" or no such
// file. The page cache counts as free, since the system releases it before an allocation fails.
std::optional<std::size_t> left_in_group(const std::string& limit_file, const std::string& usage_file,
                                         const std::string& stat_file, const std::string& cache) {
    const auto limit = number_in(limit_file), usage = number_in(usage_file);
    if (!limit || !usage) return std::nullopt;
    const std::size_t used = *usage - std::min(*usage, number_in(stat_file, cache).value_or(0));
    return *limit - std::min(*limit, used);
}

}  // namespace

std::optional<std::size_t> available_memory() {
    std::optional<std::size_t> available;
    const auto at_most = [&](const std::optional<std::size_t>& bytes) {
        if (bytes) available = std::min(*bytes, available.value_or(*bytes));
    };
    if (const auto kibibytes = number_in("/proc/meminfo", "MemAvailable:")) at_most(*kibibytes * 1024);
    // The paths of a container's own group, in both versions of control groups.
    const std::string group = "/sys/fs/cgroup/", old_group = "/sys/fs/cgroup/memory/memory.";
    at_most(left_in_group(group + "memory.max", group + "memory.current", group + "memory.stat", "file"));
    at_most(left_in_group(old_group + "limit_in_bytes", old_group + "usage_in_bytes", old_group + "stat",
                          "total_cache"));
    return available;
}

}  // namespace llmc::cpu
