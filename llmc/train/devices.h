// Which device this process computes on, among the devices of its machine and the processes there.
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
    std::unique_ptr<Device> device;
    int sharing = 1;   // processes that fill the memory of the same device
    std::string note;  // why it is the CPU, where --device leaves that open
};

// All ranks call it and come to the same kind of device, which the options then name. UserError if processes would
// share a GPU unasked, if their GPUs are of different kinds, or if what --device asks for is not there.
Place open_device(Options& options, Job& job);

// The ranks' groups, as communicators of the device's data: of `world` itself, or of NCCL's, which then has all the memory
// that it takes.
struct MeshRanks {
    std::unique_ptr<Communicator> nccl;
    MeshGroups groups;
    std::size_t memory = 0;  // bytes of the device's that it took, if no other process took some meanwhile
};
MeshRanks open_mesh(const Options& options, HostCommunicator& world, Device& device, const RunSpec& spec);
// The memory that it asks of the plan.
std::size_t staging_bytes(const Communicator& world, Device& device);

// What is free where least is, so that all ranks plan alike. All call it.
MachineMemory free_memory(const Place& place, Communicator& world);

}  // namespace llmc
