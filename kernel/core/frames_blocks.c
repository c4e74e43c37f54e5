// SPDX-License-Identifier: GPL-2.0
/*
 * Blocks: 512 frames in a row, which one entry of 2 MiB can map.
 *
 * The pool keeps blocks apart from its other frames, and hands them out whole. Their frames may
 * return one by one. They then wait until all frames of their block are back, and no user gets them
 * for anything else. So a block never falls apart. To the kernel each frame is one that was taken
 * alone, and each is on the pool's list of all frames. page->private has the number of the frame's
 * block, from 1.
 *
 * Blocks change hands seldom, and 2 MiB at a time, so the lock of the lists is enough.
 */

#include <linux/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "core/frames.h"

#define FRAME_BLOCK_ORDER	9

static void frame_block_put_free(struct frame_pool *pool, u32 number)
{
	struct frame_block *block = &pool->blocks[number - 1];

	block->next = pool->free_block;
	pool->free_block = number;
	pool->blocks_free++;
}

/* Returns a frame to its block. The lock is held. */
static void frame_block_put_back(struct frame_pool *pool, struct page *page)
{
	u32 number = page_private(page);

	pool->blocks_loose++;
	if (++pool->blocks[number - 1].back < FRAME_BLOCK)
		return;
	pool->blocks_loose -= FRAME_BLOCK;
	frame_block_put_free(pool, number);
}

void frame_set_aside(struct frame_pool *pool, struct page *page)
{
	list_move(&page->lru, &pool->pinned);
	WRITE_ONCE(pool->pinned_count, pool->pinned_count + 1);
	pool->blocks_pinned += pool->blocks && page_private(page);
}

bool frame_is_unpinned(struct frame_pool *pool, struct page *page)
{
	if (frame_is_held(page))
		return false;
	list_move(&page->lru, &pool->all);
	WRITE_ONCE(pool->pinned_count, pool->pinned_count - 1);
	if (!pool->blocks || !page_private(page))
		return true;
	pool->blocks_pinned--;
	frame_block_put_back(pool, page);
	return false;
}

static bool frame_block_make(struct frame_pool *pool, u32 number)
{
	struct page *page = alloc_pages(FRAME_GFP, FRAME_BLOCK_ORDER);
	unsigned int i;

	if (!page)
		return false;
	split_page(page, FRAME_BLOCK_ORDER);
	spin_lock(&pool->lock);
	for (i = 0; i < FRAME_BLOCK; i++) {
		set_page_private(page + i, number);
		list_add(&page[i].lru, &pool->all);
	}
	pool->blocks[number - 1] = (struct frame_block){ page_to_pfn(page), FRAME_BLOCK, 0 };
	frame_block_put_free(pool, number);
	spin_unlock(&pool->lock);
	return true;
}

int frame_blocks_init(struct frame_pool *pool, u32 count)
{
	if (!count)
		return 0;
	pool->blocks = kvcalloc(count, sizeof(*pool->blocks), GFP_KERNEL_ACCOUNT);
	if (!pool->blocks)
		return -ENOMEM;
	while (pool->block_count < count && !fatal_signal_pending(current) &&
	       frame_block_make(pool, pool->block_count + 1))
		pool->block_count++;
	return fatal_signal_pending(current) ? -EINTR : 0;
}

/* Looks for frames of blocks that were pinned when they came back, and no longer are. */
static void frame_block_find_unpinned(struct frame_pool *pool)
{
	struct page *page, *next;

	list_for_each_entry_safe(page, next, &pool->pinned, lru)
		if (page_private(page))
			frame_is_unpinned(pool, page);
}

u64 frame_block_take(struct frame_pool *pool)
{
	struct frame_block *block = NULL;

	spin_lock(&pool->lock);
	if (!pool->free_block && pool->blocks_pinned)
		frame_block_find_unpinned(pool);
	if (pool->free_block) {
		block = &pool->blocks[pool->free_block - 1];
		pool->free_block = block->next;
		pool->blocks_free--;
		block->back = 0;
	}
	spin_unlock(&pool->lock);
	return block ? block->frame : 0;
}

void frame_block_give(struct frame_pool *pool, u64 frame)
{
	struct page *page = pfn_to_page(frame);
	unsigned int i;

	spin_lock(&pool->lock);
	for (i = 0; i < FRAME_BLOCK; i++, page++) {
		if (unlikely(frame_is_held(page)))
			frame_set_aside(pool, page);
		else
			frame_block_put_back(pool, page);
	}
	spin_unlock(&pool->lock);
}

bool frame_block_take_back(struct frame_pool *pool, struct frame_lane *lane, u64 frame)
{
	struct page *page = pfn_to_page(frame);

	if (!page_private(page))
		return false;
	spin_lock(&pool->lock);
	frame_block_put_back(pool, page);
	spin_unlock(&pool->lock);
	WRITE_ONCE(lane->block_given, lane->block_given + 1);
	return true;
}

void frame_blocks_collect(struct frame_pool *pool, struct frame_lane *lane,
			  struct frame_bundle *bundle)
{
	unsigned int i, kept = 0;

	for (i = 0; i < bundle->count; i++)
		if (!frame_block_take_back(pool, lane, bundle->stack[i]))
			bundle->stack[kept++] = bundle->stack[i];
	memset(bundle->stack + kept, 0, (bundle->count - kept) * sizeof(u64));
	bundle->count = kept;
}
