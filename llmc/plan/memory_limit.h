// Checks whether a run fits the machine's memory, and finds what would make it fit: the micro-batch size, which is
// chosen here if the user gave none, and options that the error message suggests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "llmc/plan/run_plan.h"

namespace llmc {

// Whether every process on a machine can have `bytes`; of the host's memory beside a GPU.
bool fits(const MachineMemory& machine, std::size_t bytes);
bool fits_host(const MachineMemory& machine, std::size_t bytes);

// Throws UserError for sizes that are too large to plan, if a lower bound of their memory exceeds the
// machine's.
void require_possible(const RunSpec& spec);

// The needs with the largest micro-batches of at most `micro_batch` sequences that fit the memory. If none
// fit, those with the smallest.
RunNeeds needs_that_fit(const RunSpec& spec, const FindNeeds& find, std::int64_t micro_batch);

// What would make a run fit.
struct Remedy {
    RunNeeds smaller;  // with the largest micro-batch that fits, or the smallest possible one if none fits
    bool is_enough = false;  // whether `smaller` fits
    // Otherwise options with which the run would fit, the cheapest first: recompute, then ZeRO, then both; gradients
    // in bf16; the host's memory beside a GPU, if it is known, or a disk; `gpus` in all. Empty if none would do.
    std::string options{};
    int gpus = 0;  // 0: as many as there are

    // "--micro-batch-size 2", or the options, with --processes for more GPUs.
    std::string as_options() const;
};
Remedy remedy_of(const RunNeeds& run, const FindNeeds& find);

// Throws the UserError for a run that does not fit.
[[noreturn]] void refuse_memory(const RunNeeds& run, const Remedy& remedy);

// Why what is offloaded to the host's memory beside GPUs does not fit there, and what would do.
std::string lack_of_host_memory(const RunNeeds& run, const FindNeeds& find);

// A note that checkpoints have no copy of so many bytes.
std::string lack_of_copy(std::size_t bytes);

// "does not fit here: needs 28.1 GiB, 22.4 GiB free; --recompute block would fit"
std::string lack_of_memory(const RunNeeds& run, const Remedy& remedy);

}  // namespace llmc
