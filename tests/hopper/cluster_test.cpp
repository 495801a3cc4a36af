// The two blocks of a cluster, emulated: rounds of messages to each other, and protocols that are wrong.
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <string>

#include "emulated_hopper.h"
#include "hopper/cluster.h"

namespace hypermla::cute {
namespace {

constexpr int kThreads = 64, kRounds = 9, kBlocks = 4;

enum class Wrong {
  nothing,
  no_wait_for_room,   // sends before it has heard that the last message there was read
  no_wait_for_bytes,  // reads what may not have arrived
  early_credit,       // says that all has been read when it knows of one thread
  skips,              // never reads a message, and waits for the next
  plain_wait,         // that does not see the other block
  no_credit,
  no_wait_at_the_end
};

template <int places>
struct Layout {
  uint4 words[places][kThreads], credits[places][kThreads / 32];
  Array<Barrier, places> arrived, room;
};
struct Leads {
  int round[kBlocks], largest[2];  // in which round a block is; how many it was ahead of the other
};

}  // namespace

// Thread t sends to thread t - 1 of the other block.
template <int places, Wrong wrong>
void exchange_in_clusters(int* sums, Leads& leads) {
  extern __shared__ __align__(1024) unsigned char dynamic[];
  Layout<places>& shared = *reinterpret_cast<Layout<places>*>(dynamic);
  const int own = thread_id(), from = (own + 1) % kThreads;
  const auto expect = [&](int place) {
    barrier_expect(shared.arrived[place], sizeof shared.words[0]);
    barrier_expect(shared.room[place], sizeof shared.credits[0]);
  };
  if (own == 0) {
    for (int i = 0; i < places; ++i) {
      barrier_init(shared.arrived[i], 1);
      barrier_init(shared.room[i], 1);
      expect(i);
    }
    barrier_init_done();
  }
  cluster_sync();
  int sum = 0;
  const auto receive = [&](int round) {
    const int place = round % places;
    const u32 parity = round / places & 1;
    if (wrong == Wrong::plain_wait)
      barrier_wait(shared.arrived[place], parity);
    else if (wrong != Wrong::no_wait_for_bytes)
      wait_for_peer(shared.arrived[place], parity);
    if (wrong != Wrong::skips || round != 1) {
      const uint4 words = load_shared(shared_address(&shared.words[place][from]));
      sum += int(words.x + words.w) + int(shared.words[place][from].y);  // by an address, and as any member
    }
    if (wrong == Wrong::no_credit) return;
    if (wrong != Wrong::early_credit) __syncwarp();
    if (lane_id() == 0)
      send(in_peer(shared_address(&shared.credits[place][own / 32])), 0, 0, 0, 0, in_peer(shared.room[place]));
  };
  for (int round = 0; round < kRounds; ++round) {
    const int place = round % places;
    if (round >= places) {
      receive(round - places);
      if (wrong != Wrong::no_wait_for_room || own == 0) wait_for_peer(shared.room[place], (round / places - 1) & 1);
      if (own == 0) expect(place);
    }
    if (own == 0) {
      leads.round[blockIdx.x] = round;
      int& largest = leads.largest[cluster_rank()];
      largest = max(largest, round - leads.round[blockIdx.x ^ 1]);
    }
    send(in_peer(shared_address(&shared.words[place][own])), u32(round), u32(own), 7, blockIdx.x * 1000,
         in_peer(shared.arrived[place]));
  }
  for (int round = kRounds - places; round < kRounds; ++round) receive(round);
  if (wrong != Wrong::no_wait_at_the_end)
    for (int round = kRounds; round < kRounds + places; ++round)
      wait_for_peer(shared.room[round % places], (round / places - 1) & 1);
  sums[blockIdx.x * kThreads + own] = sum;
  cluster_sync();
}

namespace {

template <int places, Wrong wrong = Wrong::nothing>
Leads run() {
  static int sums[kBlocks * kThreads];
  static Leads leads;
  leads = {{-1, -1, -1, -1}, {}};
  emulated::run(
      kBlocks, kThreads, [] { exchange_in_clusters<places, wrong>(sums, leads); }, 2);
  for (int i = 0; wrong == Wrong::nothing && i < kBlocks * kThreads; ++i)
    EXPECT_EQ(sums[i], kRounds * ((kRounds - 1) / 2 + (i + 1) % kThreads + (i / kThreads ^ 1) * 1000)) << i;
  return leads;
}

TEST(HopperClusters, BlocksSendToEachOther) {
  int largest[2] = {};
  for (int i = 0; i < 20; ++i) {
    run<1>();
    const Leads leads = run<2>();
    for (int rank = 0; rank < 2; ++rank) largest[rank] = std::max(largest[rank], leads.largest[rank]);
  }
  EXPECT_GE(largest[0], 2);  // each has been ahead as far as it may
  EXPECT_GE(largest[1], 2);
}

TEST(HopperClustersDeathTest, WhatCannotGoOnStops) {
  EXPECT_DEATH((run<2, Wrong::plain_wait>()), "is seen by wait_for_peer\\(\\) alone");
  EXPECT_DEATH((run<2, Wrong::no_credit>()),
               "thread block 0: its threads wait for ever\n  threads .*"
               "\nthread block 1 beside it\n  threads |"
               "thread block 1: its threads wait for ever\n  threads .*"
               "\nthread block 0 beside it\n  threads ");
  EXPECT_DEATH(emulated::run(1, kThreads, [] { cluster_sync(); }), "no cluster");
}

#ifdef HYPERMLA_RACES
// What is told of one of them, whose results may well be right.
template <int places, Wrong wrong>
std::string told() {
  testing::internal::CaptureStderr();
  EXPECT_NONFATAL_FAILURE((run<places, wrong>()), "found()");
  return testing::internal::GetCapturedStderr();
}
void expect_told(const std::string& told, const char* what) {
  EXPECT_NE(told.find(what), std::string::npos) << told << " does not say: " << what;
}

TEST(HopperClusters, WrongProtocolsAreFound) {
  expect_told(told<1, Wrong::no_wait_for_room>(), ", which nothing orders after the ");
  expect_told(told<2, Wrong::no_wait_for_bytes>(), ", which nothing orders after the write by a message of thread");
  expect_told(told<1, Wrong::early_credit>(), "which nothing orders after the read by thread");
  expect_told(told<1, Wrong::skips>(), "is sent over one that nothing has read");
  expect_told(told<2, Wrong::no_wait_at_the_end>(), "late: nothing waits for a message of thread");
}
#endif

}  // namespace
}  // namespace hypermla::cute
