#include "simt/runtime/runtime.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <unistd.h>

#include "llmc/core/text.h"
#include "simt/executor.h"

namespace simt::runtime {
namespace {

std::string variable(const char* name) {
    const char* value = std::getenv(name);
    return value ? value : "";
}

std::uint64_t number(const char* name, const std::string& text) {
    const auto value = llmc::whole_number<std::uint64_t>(text);
    if (!value) stop(std::string(name) + "=" + text + " is not a number");
    return *value;
}

std::uint64_t number(const char* name, std::uint64_t otherwise) {
    const std::string text = variable(name);
    return text.empty() ? otherwise : number(name, text);
}

bool has_code_for(const llmc::cuda::Chip& chip) {
    return chip.architecture != 75 && chip.architecture != 100;
}

llmc::cuda::Chip chip_of(std::uint64_t architecture) {
    for (const auto& chip : {llmc::cuda::sm_80, llmc::cuda::sm_86, llmc::cuda::sm_89, llmc::cuda::sm_90}) {
        if (static_cast<std::uint64_t>(chip.architecture) == architecture) return chip;
    }
    llmc::cuda::Chip chip = llmc::cuda::sm_86;
    chip.architecture = static_cast<int>(architecture);
    if (!has_code_for(chip)) return chip;
    stop("SIMT_CHIP is 75, 80, 86, 89, 90 or 100");
}

Settings read_settings() {
    Settings s;
    s.seed = number("SIMT_SEED", s.seed);
    s.gpus = static_cast<int>(number("SIMT_GPUS", std::uint64_t{1}));
    s.chip = chip_of(number("SIMT_CHIP", std::uint64_t{80}));
    s.chip.multiprocessors =
        static_cast<int>(number("SIMT_MULTIPROCESSORS", static_cast<std::uint64_t>(s.chip.multiprocessors)));
    s.has_code = has_code_for(s.chip);
    s.gpu_memory = number("SIMT_GPU_MEMORY", s.gpu_memory);
    s.context_bytes = number("SIMT_CONTEXT_BYTES", std::uint64_t{0});
    s.nccl_bytes = number("SIMT_NCCL_BYTES", std::uint64_t{0});
    s.host_memory = number("SIMT_HOST_MEMORY", s.host_memory);
    s.driver = static_cast<int>(number("SIMT_DRIVER", static_cast<std::uint64_t>(s.driver)));
    s.gpu_uuid = variable("SIMT_GPU_UUID");
    s.slow_algorithm = static_cast<int>(number("SIMT_SLOW_ALGORITHM", std::uint64_t{11}));
    s.nccl_seconds = static_cast<double>(number("SIMT_NCCL_SECONDS", std::uint64_t{120}));
    s.count_file = variable("SIMT_COUNT");
    const std::string fails = variable("SIMT_FAIL");
    if (const auto colon = fails.find(':'); colon != std::string::npos) {
        s.fails = fails.substr(0, colon);
        s.fails_at = number("SIMT_FAIL", fails.substr(colon + 1));
    }
    if (!fails.empty() && s.fails != "launch" && s.fails != "malloc" && s.fails != "memcpy" &&
        s.fails != "memory" && s.fails != "hostmalloc" && s.fails != "nccl") {
        stop("SIMT_FAIL is launch:N, malloc:N, memcpy:N, memory:N, hostmalloc:N or nccl:N");
    }
    return s;
}

cudaError_t enqueue_launch(cudaStream_t stream, const void* kernel, const std::function<void()>& run) {
    return api_call([&](Runtime& r) {
        const CUstream_st& of = r.streams.get(stream);
        r.counts.launches(of.number);
        const std::string name = name_of_kernel(kernel);
        r.load(name, "a first launch");
        Multiprocessors& on = r.multiprocessors(of.device);
        const auto task = [&r, &on, run] {
            if (!on.has_free()) return false;
            r.counts.runs_beside(on.held());
            if (!r.strikes("launch")) run();
            return true;
        };
        r.streams.add(stream, name, task, {}, [&on] { return on.why_none_is_free(); });
        return cudaSuccess;
    });
}

// Checks a program that ended normally.
void check_at_exit(int status, void*) {
    Runtime& r = runtime();
    r.streams.stop_background();
    if (!r.settings.count_file.empty())
        r.counts.write(r.settings.count_file + "." + std::to_string(getpid()));
    if (status != 0 || r.fault() != cudaSuccess) return;
    std::string fault = r.streams.unfinished();
    if (fault.empty() && r.memory.blocks() > 0) {
        fault =
            std::to_string(r.memory.blocks()) + " allocations of device or pinned memory were never freed";
    }
    if (fault.empty()) return;
    std::fprintf(stderr, "simt: at the end of the program %s\n", fault.c_str());
    std::fflush(nullptr);
    std::_Exit(1);
}

}  // namespace

Runtime::Runtime() : settings(read_settings()), streams(settings.seed) {
    options().seed = settings.seed;
    options().queue = enqueue_launch;
    options().make_accessible = [this](const void* address, bool writes) {
        return memory.make_accessible(address, writes);
    };
    catch_faults();
    if (const std::string report = variable("KERNEL_REPORT"); !report.empty()) {
        options().report = read_kernel_report(report);
    }
    on_exit(check_at_exit, nullptr);
}

Multiprocessors::Share::~Share() {
    of_.wanted_ -= wanted_;
    if (!has_) return;
    of_.held_ -= wanted_;
    of_.free_ += wanted_;
}

bool Multiprocessors::Share::take() {
    if (has_ || of_.free_ < wanted_) return has_;
    of_.held_ += wanted_;
    of_.free_ -= wanted_;
    return has_ = true;
}

std::string Multiprocessors::why_none_is_free() const {
    return has_free() ? "" : "a free multiprocessor, of which NCCL holds " + std::to_string(held_);
}

Multiprocessors& Runtime::multiprocessors(int device) {
    return multiprocessors_.try_emplace(device, settings.chip.multiprocessors).first->second;
}

void Runtime::load(const std::string& code, const char* call) {
    if (!loaded_.insert(code).second) return;
    if (nccl_in_flight > 0) counts.loads_beside_nccl(code);
    if (settings.seed % 2 == 1) streams.wait_for_all_by_chance(call);
}

std::size_t Runtime::memory_taken(int device) const {
    const auto communicators = communicators_.find(device);
    const std::size_t number = communicators == communicators_.end() ? 0 : communicators->second;
    return memory.used(device) + settings.context_bytes + number * settings.nccl_bytes;
}

bool Runtime::strikes(const char* kind) {
    if (!is_struck(kind)) return false;
    fault_ = cudaErrorIllegalAddress;
    return true;
}

Runtime& runtime() {
    static Runtime& instance = *new Runtime;  // threads of the program may outlive its static objects
    return instance;
}

cudaUUID_t gpu_uuid(int device) {
    const std::string& given = runtime().settings.gpu_uuid;
    const std::string text = given.empty() || device != 0 ? "simulated GPU " + std::to_string(device) : given;
    cudaUUID_t uuid{};
    text.copy(uuid.bytes, sizeof(uuid.bytes));
    return uuid;
}

int& current_device() {
    thread_local int device = 0;
    return device;
}

cudaError_t& last_error() {
    thread_local cudaError_t error = cudaSuccess;
    return error;
}

}  // namespace simt::runtime
