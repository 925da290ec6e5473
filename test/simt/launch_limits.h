// Whether a chip would take a launch: its threads, blocks, shared memory and registers.
#pragma once

#include <cstddef>
#include <string>

#include "llmc/device/cuda/launch.h"
#include "simt/executor.h"
#include "simt/kernel_report.h"

namespace simt {

// Returns why the chip refuses the launch of the kernel with this symbol; empty if it accepts it. Registers
// and the kernel's own shared arrays come from the report. If the report does not have the chip, they are not
// checked. If it has the chip but not the kernel, this throws a llmc::UserError.
std::string why_refused(const llmc::cuda::Chip& chip, const Grid& grid, const KernelReport& report,
                        const std::string& symbol);

// The same for a block's shared memory alone, with this many bytes of the kernel's own arrays.
std::string why_no_room_in_shared(const llmc::cuda::Chip& chip, const DynamicShared& dynamic,
                                  std::size_t static_bytes);

}  // namespace simt
