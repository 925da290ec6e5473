#include "llmc/parallel/data_groups.h"

#include "llmc/core/error.h"

namespace llmc {

DataGroups::DataGroups(Communicator& all, const Sharding& sharding) : all_(all) {
    check(all.size() == sharding.ranks(), "the groups are of all data-parallel ranks");
    if (sharding.replicas == 1) return;
    const int shard = sharding.shard_of(all.rank()), group = all.rank() / sharding.shards;
    shards_ = all.split(group, shard);
    replicas_ = all.split(shard, group);
}

}  // namespace llmc
