#include "llmc/device/cpu/cpu_device.h"

#include <fmt/format.h>
#include <omp.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <system_error>
#include <thread>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/cpu/products.h"

namespace llmc {

namespace cpu {

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

// The directories of this process's control groups of a controller, from its own to the root's. `controller` is empty
// in the second version of control groups. In a container, only some of them may be visible.
std::vector<std::string> groups_of_process(const std::string& root, std::string_view controller) {
    std::string own;
    std::ifstream file("/proc/self/cgroup");  // lines "4:memory:/a/b"; "0::/a/b" in the second version
    for (std::string line; std::getline(file, line);) {
        const std::size_t names = line.find(':') + 1, path = line.find(':', names);
        if (path == std::string::npos) continue;
        std::istringstream among(line.substr(names, path - names));
        std::string name;
        bool is_it = controller.empty() && path == names;
        while (!controller.empty() && std::getline(among, name, ',')) is_it = is_it || name == controller;
        if (is_it) own = line.substr(path + 1);
    }
    std::vector<std::string> groups;
    for (; own.size() > 1; own.erase(own.rfind('/'))) groups.push_back(root + own);
    groups.push_back(root);
    return groups;
}

// Bytes that processes of this machine, or of this process's container, may still allocate without swapping.
// Empty if the system does not say. The page cache counts as free. A group is limited by those around it, too.
std::optional<std::size_t> available_memory() {
    std::optional<std::size_t> available;
    const auto at_most = [&](const std::optional<std::size_t>& bytes) {
        if (bytes) available = std::min(*bytes, available.value_or(*bytes));
    };
    if (const auto kibibytes = number_in("/proc/meminfo", "MemAvailable:")) at_most(*kibibytes * 1024);
    for (const std::string& group : groups_of_process("/sys/fs/cgroup", ""))
        at_most(
            left_in_group(group + "/memory.max", group + "/memory.current", group + "/memory.stat", "file"));
    for (const std::string& group : groups_of_process("/sys/fs/cgroup/memory", "memory"))
        at_most(left_in_group(group + "/memory.limit_in_bytes", group + "/memory.usage_in_bytes",
                              group + "/memory.stat", "total_cache"));
    return available;
}

// Returns the text after the colon of the line "name : text" in a /proc file.
std::optional<std::string> proc_value(const char* path, std::string_view name) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        if (!line.starts_with(name)) continue;
        const std::size_t colon = line.find(':');
        if (colon == std::string::npos) continue;
        const std::size_t first = line.find_first_not_of(" \t", colon + 1);
        return first == std::string::npos ? "" : line.substr(first);
    }
    return std::nullopt;
}

[[noreturn]] void out_of_memory(std::string_view arena, std::size_t bytes, std::string_view why) {
    user_error("the arena {} needs {} of memory, {}; give a smaller --micro-batch-size or a smaller model",
               arena, human_bytes(bytes), why);
}

}  // namespace

int default_threads() {
    if (std::getenv("OMP_NUM_THREADS") != nullptr) {
        // No machine has more threads. With more, libgomp crashes because their stacks do not fit into
        // memory.
        constexpr int most = 4096;
        const int threads = omp_get_max_threads();
        if (threads > most) user_error("OMP_NUM_THREADS {} is out of range; give 1 to {}", threads, most);
        return threads;
    }
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return std::max(1, CPU_COUNT(&allowed));
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

CpuDevice::CpuDevice(int threads)
    : threads_(threads), native_bf16_(processor_has_bf16()), ops_(threads, native_bf16_) {}

CpuDevice::~CpuDevice() {
    for (const auto& [memory, bytes] : allocations_) munmap(memory, bytes);
}

std::string CpuDevice::description() const {
    const std::string name = proc_value("/proc/cpuinfo", "model name").value_or("CPU");
    return fmt::format("{}, {} {}", name, threads_, threads_ == 1 ? "thread" : "threads");
}

std::string CpuDevice::note(DType dtype) const {
    if (dtype != DType::bf16 || native_bf16_) return {};
    return "bf16 products are computed in fp32: this processor has no bf16 instructions";
}

std::size_t CpuDevice::available_memory() const { return cpu::available_memory().value_or(0); }

std::byte* CpuDevice::allocate(std::size_t bytes, std::string_view arena) {
    if (bytes == 0) return nullptr;
    // Linux would promise more memory than there is and kill the program when it uses it.
    if (const auto available = cpu::available_memory(); available && bytes > *available) {
        out_of_memory(arena, bytes, fmt::format("but {} are available", human_bytes(*available)));
    }
    void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) out_of_memory(arena, bytes, "but the system refuses it");
    madvise(mapped, bytes, MADV_HUGEPAGE);
    auto* const memory = static_cast<std::byte*>(mapped);
    allocations_.emplace(memory, bytes);
    // Touches the pages now, so that the memory counts as used when the next arena asks what is available.
    constexpr std::size_t piece = std::size_t{1} << 21;
    parallel_for(threads_, static_cast<std::int64_t>((bytes + piece - 1) / piece), [=](std::int64_t i) {
        const std::size_t first = static_cast<std::size_t>(i) * piece;
        std::memset(memory + first, 0, std::min(piece, bytes - first));
    });
    return memory;
}

void CpuDevice::release(std::byte* memory) {
    if (memory == nullptr) return;
    const auto found = allocations_.find(memory);
    check(found != allocations_.end(), "memory is released on the device that allocated it, once");
    munmap(memory, found->second);
    allocations_.erase(found);
}

void CpuDevice::upload(const Tensor& to_device, const void* from_host) {
    std::memcpy(to_device.data, from_host, to_device.bytes());
}

void CpuDevice::download(void* to_host, const Tensor& from_device) {
    std::memcpy(to_host, from_device.data, from_device.bytes());
}

HostMemory CpuDevice::host_memory(std::size_t bytes) {
    return {new std::byte[bytes], [](std::byte* memory) { delete[] memory; }};
}

}  // namespace cpu

std::unique_ptr<Device> make_cpu_device(int threads) {
    return std::make_unique<cpu::CpuDevice>(threads == 0 ? cpu::default_threads() : threads);
}

void let_waiting_threads_sleep(char** argv, bool brief_loops) {
    if (std::getenv("OMP_WAIT_POLICY") != nullptr || std::getenv("GOMP_SPINCOUNT") != nullptr) return;
    setenv("OMP_WAIT_POLICY", "passive", 1);
    if (brief_loops) setenv("GOMP_SPINCOUNT", "1000", 1);  // some 20 microseconds
    // Uses the real path if possible: after execv of /proc/self/exe the process would be called "exe", and
    // `pkill train_gpt` would not find it.
    constexpr const char* self = "/proc/self/exe";
    std::error_code error;
    const std::filesystem::path program = std::filesystem::read_symlink(self, error);
    if (!error) execv(program.c_str(), argv);
    execv(self, argv);
    // If execv fails, the program continues without the setting.
}

}  // namespace llmc
