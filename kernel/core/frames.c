// SPDX-License-Identifier: GPL-2.0
/* The pool of frames. See frames.h for what holds. */

#include <linux/delay.h>
#include <linux/memcontrol.h>
#include <linux/mm.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "core/frames.h"

/* How often a lane looks for a frame that should be there; with the waits some seconds. */
#define ATTEMPTS	10000

static void push_shared(struct frame_pool *pool, struct frame_bundle *bundle)
{
	u64 frame = frame_of(bundle->stack);
	s64 head = atomic64_read(&pool->shared);
	u64 tag;

	do {
		set_page_private(pfn_to_page(frame), frame_pack(head & FRAME_MASK, bundle->count));
		tag = ((u64)head >> FRAME_BITS) + 1;
	} while (!atomic64_try_cmpxchg(&pool->shared, &head, frame_pack(frame, tag)));
	bundle->stack = NULL;
	bundle->count = 0;
}

static bool pop_shared(struct frame_pool *pool, struct frame_bundle *bundle)
{
	u64 frame, word, tag;
	s64 head;

	/* Between look and exchange the tag must not come round. */
	preempt_disable();
	head = atomic64_read(&pool->shared);
	do {
		frame = head & FRAME_MASK;
		if (!frame)
			break;
		word = READ_ONCE(pfn_to_page(frame)->private);
		tag = (u64)head >> FRAME_BITS;
	} while (!atomic64_try_cmpxchg(&pool->shared, &head, frame_pack(word & FRAME_MASK, tag)));
	preempt_enable();
	if (!frame)
		return false;
	set_page_private(pfn_to_page(frame), 0);
	bundle->stack = frame_memory(frame);
	bundle->count = word >> FRAME_BITS;
	return true;
}

/* Moves so many numbers from one stack to the other, and leaves none behind. */
static void move(struct frame_bundle *from, struct frame_bundle *to, unsigned int count)
{
	from->count -= count;
	memcpy(to->stack + to->count, from->stack + from->count, count * sizeof(u64));
	memset(from->stack + from->count, 0, count * sizeof(u64));
	to->count += count;
}

static void push(struct frame_pool *pool, struct frame_bundle *bundle, u64 frame)
{
	if (bundle->stack && bundle->count == FRAME_BUNDLE)
		push_shared(pool, bundle);
	if (bundle->stack)
		bundle->stack[bundle->count++] = frame;
	else
		bundle->stack = frame_memory(frame);
}

/* Keeps or gives back what is in a bundle of one of the designs for comparison. */
static void drain(struct frame_pool *pool, struct frame_lane *lane, struct frame_bundle *bundle)
{
	if (pool->design == FRAMES_STEALING)
		frame_steal_drain(lane, bundle);
	else
		frame_kernel_drain(pool, bundle);
}

void __frame_take_end(struct frame_pool *pool, struct frame_lane *lane,
		      struct frame_bundle *bundle)
{
	drain(pool, lane, bundle);
}

void frame_take_back(struct frame_pool *pool, struct frame_lane *lane,
		     struct frame_bundle *bundle, u64 frame)
{
	if (unlikely(pool->blocks) && frame_block_take_back(pool, lane, frame))
		return;
	if (pool->design == FRAMES_BUNDLES) {
		push(pool, bundle, frame);
		return;
	}
	if (bundle->count == FRAME_BUNDLE)
		drain(pool, lane, bundle);
	bundle->stack[bundle->count++] = frame;
}

void frame_take_back_one(struct frame_pool *pool, struct frame_lane *lane, u64 frame)
{
	struct frame_bundle bundle;

	frame_take_begin(pool, lane, &bundle, 0);
	frame_take_back(pool, lane, &bundle, frame);
	frame_take_end(pool, lane, &bundle);
}

static bool take_idle(struct frame_pool *pool, struct frame_lane *lane,
		      struct frame_bundle *bundle)
{
	unsigned int first = lane - pool->lanes;
	unsigned int i;

	for (i = 1; i < pool->count; i++) {
		struct frame_lane *other = &pool->lanes[(first + i) % pool->count];

		if (!atomic64_read(&other->idle))
			continue;
		*bundle = frame_unpack(atomic64_xchg(&other->idle, 0));
		if (bundle->stack)
			return true;
	}
	return false;
}

/* A frame that was pinned when it was freed, and no longer is. */
static bool take_unpinned(struct frame_pool *pool, struct frame_bundle *bundle)
{
	struct page *page, *next;
	bool found = false;

	if (!READ_ONCE(pool->pinned_count))
		return false;
	spin_lock(&pool->lock);
	list_for_each_entry_safe(page, next, &pool->pinned, lru) {
		if (!frame_is_unpinned(pool, page))
			continue;
		push(pool, bundle, page_to_pfn(page));
		found = true;
		break;
	}
	spin_unlock(&pool->lock);
	return found;
}

static u64 take_otherwise(struct frame_pool *pool, struct frame_lane *lane,
			  struct frame_bundle *bundle)
{
	bool filled;

	lane->refills++;
	if (pool->design == FRAMES_STEALING)
		filled = frame_steal_fill(pool, lane, bundle) || take_unpinned(pool, bundle);
	else
		filled = frame_kernel_fill(pool, bundle);
	return filled ? frame_take(pool, lane, bundle) : 0;
}

/*
 * Frames that are nobody's, and that nobody can have, because something has them pinned for long:
 * not while there are transfers, which let go of theirs. Who looks for frames after this finds those
 * of transfers that have ended by now.
 */
static u64 count_aside(struct frame_pool *pool)
{
	u64 pinned = READ_ONCE(pool->pinned_count), of_blocks = READ_ONCE(pool->blocks_pinned);

	smp_rmb(); /* as said above */
	return pinned > of_blocks && !atomic_read(&pool->holders) ? pinned - of_blocks : 0;
}

/*
 * What is free may be in the hands of others, who may have lost their processor, or pinned by
 * transfers: waits a moment. False when that is not so, or has gone on for too long. What was aside
 * before we looked counts, if it still is. Who looks for memory for somebody does not wait: it may be
 * him who has the frames in his hands.
 */
static bool wait_for_others(struct frame_pool *pool, u64 aside, unsigned int attempt)
{
	aside = min_t(u64, aside, count_aside(pool));
	if (frame_pool_lent(pool) + aside >= READ_ONCE(pool->frames) ||
	    attempt == ATTEMPTS || (current->flags & PF_MEMALLOC) || fatal_signal_pending(current))
		return false;
	if (attempt < ATTEMPTS / 10)
		cond_resched();
	else
		usleep_range(100, 200);
	return true;
}

/* The slow part of taking: the lane's bundle has nothing on its stack. */
u64 __frame_take(struct frame_pool *pool, struct frame_lane *lane, struct frame_bundle *bundle)
{
	unsigned int attempt = 0;
	u64 frame, aside;

	if (pool->design != FRAMES_BUNDLES)
		return take_otherwise(pool, lane, bundle);
	while (!bundle->stack) {
		lane->refills++;
		aside = count_aside(pool);
		smp_rmb(); /* counted before we look */
		if (pop_shared(pool, bundle) || take_idle(pool, lane, bundle) ||
		    take_unpinned(pool, bundle))
			break;
		if (!wait_for_others(pool, aside, attempt++))
			return 0;
	}
	if (bundle->count)
		return frame_take(pool, lane, bundle);
	frame = frame_of(bundle->stack);
	bundle->stack = NULL;
	return frame;
}

/* The slow part of taking one: the word is what the lane's bundle was. */
u64 __frame_take_one(struct frame_pool *pool, struct frame_lane *lane, u64 word)
{
	struct frame_bundle bundle = frame_unpack(word);
	u64 frame;

	if (pool->design != FRAMES_BUNDLES)
		bundle.stack = lane->scratch;
	bundle.want = 1;
	frame = __frame_take(pool, lane, &bundle);
	frame_take_end(pool, lane, &bundle);
	return frame;
}

/* Whether something holds one of the frames: the pool has one reference to each. */
static bool is_one_held(const struct frame_bundle *bundle)
{
	const u64 *frame = bundle->stack, *end = frame + bundle->count;
	u64 references = 0;

	while (frame < end)
		references += page_ref_count(pfn_to_page(*frame++));
	return references != bundle->count;
}

/* Keeps aside what something holds. */
static noinline void set_held_aside(struct frame_pool *pool, struct frame_lane *lane)
{
	struct frame_bundle *bundle = &lane->pending;
	unsigned int i;

	for (i = bundle->count; i--;) {
		struct page *page = pfn_to_page(bundle->stack[i]);

		if (!frame_is_held(page))
			continue;
		spin_lock(&pool->lock);
		frame_set_aside(pool, page);
		lane->block_given += pool->blocks && page_private(page);
		spin_unlock(&pool->lock);
		bundle->stack[i] = bundle->stack[--bundle->count];
		bundle->stack[bundle->count] = 0;
	}
}

/* The lane's pending frames become its bundle, together with what it has. */
static void settle_pending(struct frame_pool *pool, struct frame_lane *lane)
{
	struct frame_bundle more = lane->pending, less;

	if (!more.count)
		return;
	frame_take_begin(pool, lane, &less, 0);
	if (less.stack && less.count > more.count)
		swap(less, more);
	if (less.stack && more.count + less.count <= FRAME_BUNDLE) {
		/* All on the fuller stack; the other one is the next for pending frames. */
		move(&less, &more, less.count);
		lane->pending = less;
	} else {
		if (less.stack) {
			move(&less, &more, FRAME_BUNDLE - more.count);
			push_shared(pool, &more);
			more = less;
		}
		lane->pending.stack = frame_memory(more.stack[--more.count]);
		lane->pending.count = 0;
		more.stack[more.count] = 0;
	}
	frame_take_end(pool, lane, &more);
}

/* After the flush, and after secondary MMUs were told: what was pended is free, or kept aside. */
void frame_settle(struct frame_pool *pool, struct frame_lane *lane)
{
	/* The kernel looks after those that go back to it. */
	if (pool->design != FRAMES_FROM_KERNEL && unlikely(is_one_held(&lane->pending)))
		set_held_aside(pool, lane);
	if (unlikely(pool->blocks))
		frame_blocks_collect(pool, lane, &lane->pending);
	if (pool->design == FRAMES_BUNDLES)
		settle_pending(pool, lane);
	else
		drain(pool, lane, &lane->pending);
}

/*
 * Frames in the hands of users, as far as they have said; so many at least. A frame that changes
 * hands meanwhile may be given before we look and taken again after that, and must not count twice:
 * so what was taken is counted first. What is not to count, those of blocks, the other way round.
 */
static u64 count_lent(struct frame_pool *pool, bool blocks)
{
	u64 taken = 0, given = 0;
	unsigned int i;

	for (i = 0; i < pool->count; i++) {
		const struct frame_lane *lane = &pool->lanes[i];

		taken += READ_ONCE(lane->taken) + (blocks ? 0 : READ_ONCE(lane->block_given));
	}
	smp_rmb(); /* as said above */
	for (i = 0; i < pool->count; i++) {
		const struct frame_lane *lane = &pool->lanes[i];

		given += READ_ONCE(lane->given) + (blocks ? 0 : READ_ONCE(lane->block_taken));
	}
	return taken > given ? taken - given : 0;
}

u64 frame_pool_resident(struct frame_pool *pool)
{
	return count_lent(pool, true);
}

u64 frame_pool_lent(struct frame_pool *pool)
{
	return count_lent(pool, false);
}

static struct page *frame_from_kernel(struct frame_pool *pool)
{
	struct page *page = alloc_page(FRAME_GFP);

	if (page) {
		spin_lock(&pool->lock);
		list_add(&page->lru, &pool->all);
		spin_unlock(&pool->lock);
	}
	return page;
}

static void frame_to_kernel(struct frame_pool *pool, struct page *page)
{
	spin_lock(&pool->lock);
	list_del(&page->lru);
	spin_unlock(&pool->lock);
	put_page(page);
}

u64 frame_pool_resize(struct frame_pool *pool, struct frame_lane *lane, u64 frames)
{
	struct frame_bundle bundle;
	struct page *page;
	u64 frame;

	if (pool->design == FRAMES_FROM_KERNEL) {
		WRITE_ONCE(pool->frames, frames);
		return frames;
	}
	frame_take_begin(pool, lane, &bundle, 1);
	while (pool->frames < frames && !fatal_signal_pending(current)) {
		page = frame_from_kernel(pool);
		if (!page)
			break;
		frame_take_back(pool, lane, &bundle, page_to_pfn(page));
		WRITE_ONCE(pool->frames, pool->frames + 1);
		cond_resched();
	}
	while (pool->frames > frames) {
		frame = frame_take(pool, lane, &bundle);
		if (!frame)
			break;
		frame_to_kernel(pool, pfn_to_page(frame));
		WRITE_ONCE(pool->frames, pool->frames - 1);
		cond_resched();
	}
	frame_take_end(pool, lane, &bundle);
	return pool->frames;
}

static bool make_lane(struct frame_pool *pool, struct frame_lane *lane)
{
	bool needs_scratch = pool->design != FRAMES_BUNDLES;
	struct page *pending = frame_from_kernel(pool);
	struct page *scratch = needs_scratch ? frame_from_kernel(pool) : NULL;

	if (!pending || (needs_scratch && !scratch))
		return false;
	spin_lock_init(&lane->lock);
	lane->pending.stack = page_address(pending);
	lane->scratch = scratch ? page_address(scratch) : NULL;
	return true;
}

/* Gives the users' frames to where they are taken from. */
static bool fill(struct frame_pool *pool)
{
	struct frame_bundle bundle = {};
	struct page *page;
	u64 i;

	for (i = 0; i < pool->frames; i++) {
		page = fatal_signal_pending(current) ? NULL : frame_from_kernel(pool);
		if (!page)
			return false;
		if (pool->design == FRAMES_STEALING) {
			frame_steal_add(&pool->lanes[i % pool->count], page);
			continue;
		}
		push(pool, &bundle, page_to_pfn(page));
		if (!(i % FRAME_BUNDLE))
			cond_resched();
	}
	if (bundle.stack)
		push_shared(pool, &bundle);
	return true;
}

/* Takes the frames from the kernel, zeroed. */
int frame_pool_init(struct frame_pool *pool, enum frame_design design, u64 frames,
		    unsigned int lanes)
{
	unsigned int lane;

	spin_lock_init(&pool->lock);
	INIT_LIST_HEAD(&pool->all);
	INIT_LIST_HEAD(&pool->pinned);
	atomic64_set(&pool->shared, 0);
	atomic64_set(&pool->outstanding, 0);
	atomic_set(&pool->holders, 0);
	pool->lanes = kvcalloc(lanes, sizeof(*pool->lanes), GFP_KERNEL_ACCOUNT);
	if (!pool->lanes)
		return -ENOMEM;
	pool->design = design;
	pool->frames = frames;
	pool->count = lanes;
	for (lane = 0; lane < lanes; lane++)
		if (!make_lane(pool, &pool->lanes[lane]))
			goto failed;
	if (design == FRAMES_FROM_KERNEL || fill(pool))
		return 0;
failed:
	frame_pool_destroy(pool);
	return fatal_signal_pending(current) ? -EINTR : -ENOMEM;
}

/* Gives all frames back, wherever they are. Nothing maps them any more. */
void frame_pool_destroy(struct frame_pool *pool)
{
	struct page *page, *next;

	if (!pool->lanes)
		return;
	list_splice_init(&pool->pinned, &pool->all);
	list_for_each_entry_safe(page, next, &pool->all, lru) {
		list_del(&page->lru);
		set_page_private(page, 0);
		/* Whoever has it pinned still keeps it alive. */
		put_page(page);
		cond_resched();
	}
	kvfree(pool->blocks);
	pool->blocks = NULL;
	pool->block_count = pool->free_block = pool->blocks_free = 0;
	pool->blocks_loose = pool->blocks_pinned = 0;
	kvfree(pool->lanes);
	pool->lanes = NULL;
}
