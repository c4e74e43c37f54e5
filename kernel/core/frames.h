/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A pool of page frames, taken from the kernel when it is made and given back when it ends; in
 * between they only change hands between the pool and its user.
 *
 * Frames travel in bundles: a free frame whose memory is a stack of the numbers of up to 512 other
 * free frames (refined exmap, section III-B). Each of the pool's users has a lane, and is alone in
 * it. A lane keeps one bundle, and visits the list that all share for one of 513 frames. A lane
 * that finds that list empty takes the bundle of one that is idle, so that a frame which is free is
 * found.
 *
 * What holds:
 * - a frame is in one place: in a bundle, in the hands of a lane's user, or kept aside while
 *   something holds it;
 * - only the pool writes a frame that is in a bundle, so what a stack says is true. A frame comes
 *   back there after TLBs were flushed and secondary MMUs were told, and only if the pool has its
 *   only reference; the pool looks at the count of every frame. The core takes references through
 *   a page's entry, under the lock of its table; so does KVM, which for nested virtualisation
 *   keeps them and writes, also to frames of a surface that is not pinnable. A fast pin does
 *   without the lock, but looks at the entry again and gives up. The entry was changed before,
 *   under that lock and by an atomic operation: no reference is taken after the pool has looked;
 * - a frame that is handed out does not have numbers of other frames in it;
 * - frames of blocks (frames_blocks.c) are never among those of bundles;
 * - all frames are on one list, so that none is lost, whatever became of its user.
 */
#ifndef VELLUM_FRAMES_H
#define VELLUM_FRAMES_H

#include <linux/atomic.h>
#include <linux/cache.h>
#include <linux/list.h>
#include <linux/mm_types.h>
#include <linux/page_ref.h>
#include <linux/spinlock.h>
#include <linux/types.h>

#define FRAME_BUNDLE	512
/* Frames of a block. */
#define FRAME_BLOCK	512

/* Failing is better than killing some process for it. */
#define FRAME_GFP (GFP_KERNEL_ACCOUNT | __GFP_ZERO | __GFP_RETRY_MAYFAIL | __GFP_NOWARN)

/* Free frames in somebody's hands. The frame that the stack lies in is one more of them. */
struct frame_bundle {
	u64		*stack;		/* NULL: none at all */
	unsigned int	count;		/* numbers on the stack */
	unsigned int	want;		/* how many the user is going to take, as far as he knows */
};

/* How frames are kept. All but the first are for comparison. */
enum frame_design {
	FRAMES_BUNDLES,		/* as said above */
	FRAMES_STEALING,	/* a list in each lane; lanes steal: frames_steal.c */
	FRAMES_FROM_KERNEL,	/* each from the kernel and back to it: frames_kernel.c */
};

struct frame_lane {
	/* The lane's bundle while its user does nothing: packed into a word, taken by exchange. */
	atomic64_t		idle;
	/* Frames that were freed and wait for the flush. The stack's frame is not one of them. */
	struct frame_bundle	pending;
	/* Frames, and visits to what is shared; written by the lane's user alone. */
	u64			taken, given, refills;
	/* Those among them that are of blocks. */
	u64			block_taken, block_given;

	/* The designs for comparison: what the user's bundle lies in, which is never handed out. */
	u64			*scratch;
	/* FRAMES_STEALING: a chain through page->private, and how long it is. */
	spinlock_t		lock;
	u64			first, length;	/* the length is looked at without the lock */
	unsigned int		victim;		/* from whom the lane stole last */
} ____cacheline_aligned_in_smp;

struct frame_block {
	u64		frame;		/* the first */
	u32		back;		/* frames that nobody has */
	u32		next;		/* of those that are whole; 0: none */
};

struct frame_pool {
	enum frame_design	design;
	u64			frames;		/* that users may have, but for those of blocks */
	unsigned int		count;		/* of lanes */
	struct frame_lane	*lanes;

	/* The bundles that no lane has: number of the first one's frame, and a tag. */
	atomic64_t		shared ____cacheline_aligned_in_smp;

	spinlock_t		lock;		/* protects the lists */
	struct list_head	all;		/* frames, through page->lru */
	struct list_head	pinned;		/* those that were freed while something had them */
	unsigned long		pinned_count;

	/* Under the lock, but for the first two. */
	struct frame_block	*blocks;	/* NULL: there are none, and never will be */
	u32			block_count;
	u32			free_block;	/* the first of those that are whole; 0: none */
	u32			blocks_free;	/* how many of them there are */
	u64			blocks_loose;	/* frames that are back, of blocks that are not */
	u64			blocks_pinned;	/* frames that are among the pinned ones */

	/* Transfers under way: what they have pinned must not be reused, and is soon let go. */
	atomic_t		holders;
	atomic64_t		outstanding;	/* FRAMES_FROM_KERNEL: frames that users have */
};

int frame_pool_init(struct frame_pool *pool, enum frame_design design, u64 frames,
		    unsigned int lanes);
void frame_pool_destroy(struct frame_pool *pool);
u64 frame_pool_resident(struct frame_pool *pool);
/* The same without those of blocks. */
u64 frame_pool_lent(struct frame_pool *pool);

/*
 * More frames, or fewer, of those that are free; the caller is the lane's user. Returns how many
 * frames the pool has then.
 */
u64 frame_pool_resize(struct frame_pool *pool, struct frame_lane *lane, u64 frames);

/* A frame that a user had when everything ends. Only for FRAMES_FROM_KERNEL, which has no list. */
void frame_pool_forget(struct frame_pool *pool, u64 frame);

/*
 * Taking frames, with the lane's bundle in the caller's hands from begin to end; or one, and the
 * bundle is the lane's again. A frame comes back in the caller's hands, or by itself.
 */
u64 __frame_take(struct frame_pool *pool, struct frame_lane *lane, struct frame_bundle *bundle);
u64 __frame_take_one(struct frame_pool *pool, struct frame_lane *lane, u64 word);
void frame_take_back(struct frame_pool *pool, struct frame_lane *lane,
		     struct frame_bundle *bundle, u64 frame);
void frame_take_back_one(struct frame_pool *pool, struct frame_lane *lane, u64 frame);
void __frame_take_end(struct frame_pool *pool, struct frame_lane *lane,
		      struct frame_bundle *bundle);

/* Giving frames back: pended while they may be in TLBs, settled after the flush. */
void frame_settle(struct frame_pool *pool, struct frame_lane *lane);

/*
 * Blocks, for a pool that has just been made. There are fewer than asked for where the kernel does
 * not have so many frames in a row.
 */
int frame_blocks_init(struct frame_pool *pool, u32 count);

/*
 * The first frame of a block; 0 when no block is whole. Given back after the flush. The user counts
 * them in his lane.
 */
u64 frame_block_take(struct frame_pool *pool);
void frame_block_give(struct frame_pool *pool, u64 frame);

/* A single frame; false if it is of no block. And all that are in a bundle. */
bool frame_block_take_back(struct frame_pool *pool, struct frame_lane *lane, u64 frame);
void frame_blocks_collect(struct frame_pool *pool, struct frame_lane *lane,
			  struct frame_bundle *bundle);

/*
 * A bundle in one word: number of the stack's frame, and how many are on the stack. The same in the
 * page->private of a bundle on the shared list, with the next one's frame. The list's head has a
 * tag in place of the count, which is advanced by every push: what was popped and pushed again
 * between somebody's look and his exchange is not taken for what it was.
 */
#define FRAME_BITS	40
#define FRAME_MASK	((1ULL << FRAME_BITS) - 1)

static inline u64 frame_pack(u64 frame, u64 count_or_tag)
{
	return frame | count_or_tag << FRAME_BITS;
}

static inline u64 frame_of(u64 *stack)
{
	return page_to_pfn(virt_to_page(stack));
}

static inline u64 *frame_memory(u64 frame)
{
	return page_address(pfn_to_page(frame));
}

static inline struct frame_bundle frame_unpack(u64 word)
{
	struct frame_bundle bundle = {};

	if (word) {
		bundle.stack = frame_memory(word & FRAME_MASK);
		bundle.count = word >> FRAME_BITS;
	}
	return bundle;
}

/* Whether something has a reference, apart from the pool. */
static inline bool frame_is_held(struct page *page)
{
	return page_ref_count(page) != 1;
}

/* Frames that something holds; the lock is held. True: it is free, and the caller's. */
void frame_set_aside(struct frame_pool *pool, struct page *page);
bool frame_is_unpinned(struct frame_pool *pool, struct page *page);

/* The other designs: fill an empty bundle, take back what is left of it, and what was freed. */
void frame_steal_add(struct frame_lane *lane, struct page *page);
bool frame_steal_fill(struct frame_pool *pool, struct frame_lane *lane,
		      struct frame_bundle *bundle);
void frame_steal_drain(struct frame_lane *lane, struct frame_bundle *bundle);
bool frame_kernel_fill(struct frame_pool *pool, struct frame_bundle *bundle);
void frame_kernel_drain(struct frame_pool *pool, struct frame_bundle *bundle);

static inline void frame_take_begin(struct frame_pool *pool, struct frame_lane *lane,
				    struct frame_bundle *bundle, unsigned int want)
{
	if (likely(pool->design == FRAMES_BUNDLES))
		*bundle = frame_unpack(atomic64_xchg(&lane->idle, 0));
	else
		*bundle = (struct frame_bundle){ .stack = lane->scratch };
	bundle->want = want;
}

static inline void frame_take_end(struct frame_pool *pool, struct frame_lane *lane,
				  struct frame_bundle *bundle)
{
	if (unlikely(pool->design != FRAMES_BUNDLES))
		__frame_take_end(pool, lane, bundle);
	else if (likely(bundle->stack))
		atomic64_set_release(&lane->idle,
				     frame_pack(frame_of(bundle->stack), bundle->count));
}

/* The number of a free frame; 0 when there is none. */
static inline u64 frame_take(struct frame_pool *pool, struct frame_lane *lane,
			     struct frame_bundle *bundle)
{
	u64 frame;

	if (unlikely(!bundle->count))
		return __frame_take(pool, lane, bundle);
	frame = bundle->stack[--bundle->count];
	bundle->stack[bundle->count] = 0;
	return frame;
}

static inline u64 frame_take_one(struct frame_pool *pool, struct frame_lane *lane)
{
	u64 word = 0, frame, *top;

	if (likely(pool->design == FRAMES_BUNDLES))
		word = atomic64_xchg(&lane->idle, 0);
	/* Nothing is on the stack, or there is none. */
	if (unlikely(word <= FRAME_MASK))
		return __frame_take_one(pool, lane, word);
	word -= frame_pack(0, 1);
	top = frame_memory(word & FRAME_MASK) + (word >> FRAME_BITS);
	frame = *top;
	*top = 0;
	atomic64_set_release(&lane->idle, word);
	return frame;
}

/*
 * Keeps the number of a frame that was taken off. True: there is room for no more, so flush and
 * settle before the next.
 */
static inline bool frame_pend(struct frame_lane *lane, u64 frame)
{
	lane->pending.stack[lane->pending.count++] = frame;
	return unlikely(lane->pending.count == FRAME_BUNDLE);
}

/*
 * A single frame that was taken off, after the flush and after secondary MMUs were told: it goes on
 * top of the lane's bundle, or is pended and settled. The lane has nothing pending.
 */
static inline void frame_settle_one(struct frame_pool *pool, struct frame_lane *lane, u64 frame)
{
	u64 word = 0;

	if (likely(pool->design == FRAMES_BUNDLES && !pool->blocks &&
		   !frame_is_held(pfn_to_page(frame))))
		word = atomic64_xchg(&lane->idle, 0);
	if (likely(word && word >> FRAME_BITS < FRAME_BUNDLE)) {
		frame_memory(word & FRAME_MASK)[word >> FRAME_BITS] = frame;
		atomic64_set_release(&lane->idle, word + frame_pack(0, 1));
		return;
	}
	if (word)
		atomic64_set_release(&lane->idle, word);
	frame_pend(lane, frame);
	frame_settle(pool, lane);
}

#endif /* VELLUM_FRAMES_H */
