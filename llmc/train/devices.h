// The choice of this process's device among the devices of its machine.
#pragma once

#include <memory>
#include <string>

#include "llmc/comm/bootstrap.h"
#include "llmc/comm/communicator.h"
#include "llmc/device/device.h"
#include "llmc/parallel/mesh_groups.h"
#include "llmc/plan/run_plan.h"
#include "llmc/train/options.h"

namespace llmc {

struct Place {
    Configuration run;
    std::unique_ptr<Device> device;
    int sharing = 1;   // the number of processes that use the same device's memory
    std::string note;  // why --device auto chose the CPU
};

// All ranks call it and choose the same kind of device, for which the run is configured. Throws UserError if
// processes would share a GPU without --share-gpu, if their GPUs are of different kinds, or if --device is
// not available.
Place open_device(const Options& options, Job& job);

// The groups of the mesh, as communicators for the device's data. They come from `world` or from NCCL. NCCL
// allocates all its memory here.
struct MeshRanks {
    std::unique_ptr<Communicator> nccl;
    MeshGroups groups;
    std::size_t memory =
        0;  // bytes of device memory that NCCL took; inexact if another process allocates at the same time
};
MeshRanks open_mesh(const Options& options, HostCommunicator& world, Device& device, const RunSpec& spec);
// The size of the staging memory that the communicator needs among the plan's arenas.
std::size_t staging_bytes(const Communicator& world, Device& device);

// The free memory of the machine or GPU that has least per process, and of the host that has least beside GPUs, so that
// all ranks make the same plan. `processes_here` is their number on this machine. All ranks call it.
MachineMemory free_memory(const Place& place, Communicator& world, int processes_here);

}  // namespace llmc
