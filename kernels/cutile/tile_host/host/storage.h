// The memory of tiles: reference-counted blocks, recycled through a free list of the thread that frees them.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdlib>
#include <new>
#include <utility>

#include "trap.h"

namespace cuda::tiles::host {

struct Block;
void release(Block* block) noexcept;

// A tile never leaves its thread, so the count is not atomic.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t bytes);
  Buffer(const Buffer& other) noexcept;
  Buffer(Buffer&& other) noexcept : block_(std::exchange(other.block_, nullptr)) {}
  Buffer& operator=(Buffer other) noexcept {
    std::swap(block_, other.block_);
    return *this;
  }
  ~Buffer() {
    if (block_) release(block_);
  }

  explicit operator bool() const noexcept { return block_ != nullptr; }
  bool unique() const noexcept;
  void* data() const noexcept;

 private:
  Block* block_ = nullptr;
};

inline constexpr std::size_t kBlockAlignment = 64;

struct alignas(kBlockAlignment) Block {
  std::size_t bytes;  // of the contents, which follow this header
  std::size_t references;
  Block* next_free;
};

#ifdef HYPERMLA_TILE_DEBUG
inline constexpr bool kRecycle = false;
#else
inline constexpr bool kRecycle = true;
#endif

// One list per power of two.
class FreeList {
 public:
  ~FreeList() {
    for (Block*& head : heads_) {
      while (head) std::free(std::exchange(head, head->next_free));
    }
  }
  Block* get(std::size_t bytes) {
    Block*& head = heads_[std::bit_width(bytes)];
    if (head) return std::exchange(head, head->next_free);
    return static_cast<Block*>(std::aligned_alloc(kBlockAlignment, sizeof(Block) + bytes));
  }
  void put(Block* block) noexcept { block->next_free = std::exchange(heads_[std::bit_width(block->bytes)], block); }

 private:
  Block* heads_[65] = {};
};
inline thread_local FreeList free_list;

inline Buffer::Buffer(std::size_t bytes) {
  bytes = std::bit_ceil(bytes < kBlockAlignment ? kBlockAlignment : bytes);
  void* memory = kRecycle ? free_list.get(bytes) : std::aligned_alloc(kBlockAlignment, sizeof(Block) + bytes);
  if (!memory) throw std::bad_alloc();
  block_ = new (memory) Block{bytes, 1, nullptr};
}
inline Buffer::Buffer(const Buffer& other) noexcept : block_(other.block_) {
  if (block_) ++block_->references;
}
inline bool Buffer::unique() const noexcept { return block_ && block_->references == 1; }
inline void* Buffer::data() const noexcept { return block_ + 1; }

inline void release(Block* block) noexcept {
  if (--block->references) return;
  if (kRecycle) {
    free_list.put(block);
  } else {
    std::free(block);
  }
}

}  // namespace cuda::tiles::host
