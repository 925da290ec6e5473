// Whether a chip would take a launch: its threads, blocks, shared memory and registers.
#pragma once

#include <cstddef>
#include <string>

#include "llmc/device/cuda/chip.h"
#include "simt/executor.h"
#include "simt/kernel_report.h"

namespace simt {

// Why the chip refuses the launch of the kernel of this symbol; empty where it does not. Registers and the kernel's own shared
// arrays are the report's; of a chip that the report does not have, nothing is known, and nothing checked. A report that has
// the chip and not the kernel is a llmc::UserError.
std::string why_refused(const llmc::cuda::Chip& chip, const Grid& grid, const KernelReport& report,
                        const std::string& symbol);

// The same of a block's shared memory alone, with this many bytes of the kernel's own arrays.
std::string why_no_room_in_shared(const llmc::cuda::Chip& chip, const DynamicShared& dynamic,
                                  std::size_t static_bytes);

}  // namespace simt
