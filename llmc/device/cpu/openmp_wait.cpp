#include "llmc/device/cpu/openmp_wait.h"

#include <unistd.h>

#include <cstdlib>

namespace llmc {

void let_waiting_threads_sleep(char** argv) {
    if (std::getenv("OMP_WAIT_POLICY") != nullptr || std::getenv("GOMP_SPINCOUNT") != nullptr) return;
    setenv("OMP_WAIT_POLICY", "passive", 1);
    execv("/proc/self/exe", argv);
    // Where that is not allowed, the program goes on as it is.
}

}  // namespace llmc
