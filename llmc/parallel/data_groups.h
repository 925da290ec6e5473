// The data-parallel ranks as communicators: all of them, those that share a whole state in shards, and those that have
// the same shard.
#pragma once

#include <memory>

#include "llmc/comm/communicator.h"
#include "llmc/parallel/sharding.h"

namespace llmc {

class DataGroups {
  public:
    // All ranks make it at once. `all` outlives it.
    DataGroups(Communicator& all, const Sharding& sharding);

    Communicator& all() const { return all_; }
    Communicator& shards() const { return shards_ ? *shards_ : all_; }
    // Only where there are several groups.
    Communicator& replicas() const { return *replicas_; }

  private:
    Communicator& all_;
    std::unique_ptr<Communicator> shards_, replicas_;
};

}  // namespace llmc
