#include "llmc/device/cpu/openmp_wait.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <system_error>

namespace llmc {

void let_waiting_threads_sleep(char** argv) {
    if (std::getenv("OMP_WAIT_POLICY") != nullptr || std::getenv("GOMP_SPINCOUNT") != nullptr) return;
    setenv("OMP_WAIT_POLICY", "passive", 1);
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
