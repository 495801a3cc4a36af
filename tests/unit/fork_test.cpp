// What a forked child may do, whose parent has started threads.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <new>
#include <thread>

#include "hypermla/base/per_process.h"
#include "hypermla/base/process.h"
#include "hypermla/device/pool.h"

namespace hypermla::fork_test {
namespace {

// The exit status of a child that does this; a child that hangs is ended by a signal and has none.
int status_of_child(const std::function<int()>& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    ::_exit(work());
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int blocks_run(Pool& pool) {
  std::atomic<int> blocks = 0;
  const std::string error = pool.run(50, 3, [&](std::uint64_t) {
    ++blocks;
    return nullptr;
  });
  return error.empty() ? blocks.load() : -1;
}

TEST(Fork, AChildHasAPoolOfItsOwn) {
  auto pool = std::make_unique<Pool>();
  EXPECT_EQ(blocks_run(*pool), 50);
  EXPECT_EQ(status_of_child([&] { return blocks_run(*pool); }), 50);
  EXPECT_EQ(status_of_child([&] {
              const int blocks = blocks_run(*pool);
              pool.reset();  // joins its own threads only
              return blocks;
            }),
            50);
  EXPECT_EQ(status_of_child([&] {
              pool.reset();  // has none
              return 7;
            }),
            7);
  EXPECT_EQ(blocks_run(*pool), 50);
}

TEST(Fork, AGrandchildToo) {
  Pool pool;
  blocks_run(pool);
  EXPECT_EQ(status_of_child([&] {
              blocks_run(pool);
              return status_of_child([&] { return blocks_run(pool); });
            }),
            50);
}

TEST(Fork, WhatIsPerProcessIsMadeOnceInEach) {
  struct Counted {
    std::shared_ptr<int> made = std::make_shared<int>(3);
  };
  PerProcess<Counted> counted;
  ++*counted.get().made;
  EXPECT_EQ(*counted.get().made, 4);
  EXPECT_EQ(status_of_child([&] {
              ++*counted.get().made;
              return ++*counted.get().made;
            }),
            5);
  EXPECT_EQ(*counted.get().made, 4);
}

// A program that a process runs is not the child's to end, which ends by itself meanwhile.
TEST(Fork, AChildsEndEndsNoProgramOfItsParent) {
  ProcessResult done = {};
  std::thread runs([&] { done = run_process({"/bin/sh", "-c", "sleep 1; exit 5"}); });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_EQ(status_of_child([&] {
              end_programs();
              return 3;
            }),
            3);
  runs.join();
  EXPECT_EQ(done.status, 5);
}

TEST(Pool, WhatABlockThrowsReachesTheCaller) {
  Pool pool;
  for (int i = 0; i < 2; ++i) {
    EXPECT_THROW(pool.run(50, 3,
                          [](std::uint64_t block) -> const char* {
                            if (block == 20) throw std::bad_alloc();
                            return nullptr;
                          }),
                 std::bad_alloc);
    EXPECT_EQ(blocks_run(pool), 50);
  }
}

}  // namespace
}  // namespace hypermla::fork_test
