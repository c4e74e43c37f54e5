// SPDX-License-Identifier: GPL-2.0
/* Transfers between a surface and its backing file. transfer.h lists their invariants. */

#include <linux/bio.h>
#include <linux/blkdev.h>
#include <linux/bvec.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>
#include <linux/uio.h>

#include "exmap/transfer.h"
#include "trace.h"

/* Pages of the longest transfer: 1 MiB. */
#define TRANSFER_PAGES	256

bool exmap_transfer_is_possible(struct exmap *exmap, bool write)
{
	return exmap->backing && exmap->backing->f_mode & (write ? FMODE_WRITE : FMODE_READ);
}

struct exmap_transfer_batch *exmap_transfer_get_batch(struct exmap_interface *interface)
{
	if (unlikely(!interface->batch))
		interface->batch = kmalloc(sizeof(*interface->batch), GFP_KERNEL_ACCOUNT);
	return interface->batch;
}

static void exmap_batch_begin(struct exmap_transfer_batch *batch, struct exmap *exmap,
			      unsigned int index)
{
	batch->exmap = exmap;
	batch->index = index;
	batch->holds = false;
	batch->zeros = 0;
	batch->has_gap = false;
	batch->short_one = NULL;
	INIT_LIST_HEAD(&batch->transfers);
	atomic_set(&batch->left, 1);
	batch->finished = NULL;
	batch->state = BATCH_WAITED_FOR;
	init_completion(&batch->done);
	frame_take_begin(&exmap->pool, &exmap->pool.lanes[index], &batch->bundle, 0);
}

static struct exmap_transfer *exmap_batch_add(struct exmap_transfer_batch *batch,
					      enum exmap_transfer_kind kind,
					      struct exmap_range range, struct exmap_result *result)
{
	unsigned int room = min_t(unsigned int, range.count, TRANSFER_PAGES);
	struct exmap_transfer *transfer = &batch->single;

	if (room == 1 && list_empty(&batch->transfers)) {
		transfer->pages = &batch->single_page;
	} else {
		transfer = kmalloc(sizeof(*transfer) + room * sizeof(*transfer->pages),
				   GFP_KERNEL_ACCOUNT);
		if (!transfer) {
			result->error = -ENOMEM;
			return NULL;
		}
		transfer->pages = (struct bio_vec *)(transfer + 1);
	}
	transfer->count = 0;
	transfer->outcome = 0;
	transfer->batch = batch;
	transfer->result = result;
	transfer->kind = kind;
	transfer->page = range.page;
	list_add_tail(&transfer->node, &batch->transfers);
	return transfer;
}

static void exmap_transfer_remove(struct exmap_transfer *transfer)
{
	list_del(&transfer->node);
	if (transfer != &transfer->batch->single)
		kfree(transfer);
}

static void exmap_transfer_add_page(struct exmap_transfer *transfer, struct page *page)
{
	transfer->pages[transfer->count++] = (struct bio_vec){ .bv_page = page,
							       .bv_len = PAGE_SIZE };
}

/*
 * Either a thread that frees the page finds it held, or this thread finds it gone: each reads what
 * the other does after it has done its own part.
 */
struct page *exmap_transfer_hold(struct exmap *exmap, u64 number)
{
	struct page *page;
	u64 frame;

	for (;;) {
		frame = exmap_frame(exmap, number);
		if (!frame)
			return NULL;
		page = pfn_to_page(frame);
		/* The pool may have shrunk by this frame since it was read. */
		if (!get_page_unless_zero(page))
			continue;
		smp_mb__after_atomic(); /* held before the page is read again */
		if (exmap_frame(exmap, number) == frame)
			return page;
		put_page(page);
	}
}

static struct page *exmap_batch_hold(struct exmap_transfer_batch *batch, u64 number)
{
	if (!batch->holds) {
		atomic_inc(&batch->exmap->pool.holders);
		smp_mb__after_atomic(); /* raised before the read: exmap_may_be_pinned() */
		batch->holds = true;
	}
	return exmap_transfer_hold(batch->exmap, number);
}

/*
 * Plans to read the pages of the range that are not there, and with `refresh` those that are. A
 * page without a frame to read into ends the range.
 */
static void exmap_batch_fill(struct exmap_transfer_batch *batch, struct exmap_range range,
			     bool refresh, struct exmap_result *result)
{
	struct exmap *exmap = batch->exmap;
	struct frame_lane *lane = &exmap->pool.lanes[batch->index];
	struct exmap_transfer *transfer = NULL;

	for (; range.count; range.page++, range.count--) {
		bool is_huge;
		pteval_t *leaf = exmap_make_leaf(exmap, range.page, &is_huge);
		enum exmap_transfer_kind kind = TRANSFER_FILL;
		struct page *page = NULL;
		u64 frame = 0;

		if (!leaf && !is_huge) {
			result->error = -ENOMEM;
			return;
		}
		/* An entry that is none needs no further look. */
		if (!leaf || (READ_ONCE(*leaf) && exmap_frame(exmap, range.page))) {
			exmap_found(exmap, &batch->zeros);
			page = refresh ? exmap_batch_hold(batch, range.page) : NULL;
			kind = TRANSFER_REFRESH;
			if (!page) {
				transfer = NULL;
				batch->has_gap = true;
				continue;
			}
		}
		if (!transfer || transfer->kind != kind || transfer->count == TRANSFER_PAGES)
			transfer = exmap_batch_add(batch, kind, range, result);
		if (transfer && kind == TRANSFER_FILL) {
			frame = frame_take(&exmap->pool, lane, &batch->bundle);
			page = frame ? pfn_to_page(frame) : NULL;
			lane->taken += frame != 0;
		}
		if (!transfer || !page) {
			if (page)
				put_page(page);
			result->error = -ENOMEM;
			return;
		}
		exmap_transfer_add_page(transfer, page);
	}
}

static void exmap_transfer_let_go(struct exmap_transfer *transfer)
{
	unsigned int i;

	for (i = 0; i < transfer->count; i++)
		put_page(transfer->pages[i].bv_page);
	transfer->count = 0;
}

/* Plans to write the range. All of its pages must be there. */
static void exmap_batch_write(struct exmap_transfer_batch *batch, struct exmap_range range,
			      struct exmap_result *result)
{
	struct list_head *before = batch->transfers.prev;
	struct exmap_transfer *transfer = NULL;

	for (; range.count; range.page++, range.count--) {
		struct page *page = exmap_batch_hold(batch, range.page);

		if (!page) {
			result->error = -ENOENT;
			break;
		}
		exmap_found(batch->exmap, &batch->zeros);
		if (!transfer || transfer->count == TRANSFER_PAGES)
			transfer = exmap_batch_add(batch, TRANSFER_WRITE, range, result);
		if (!transfer) {
			put_page(page);
			break;
		}
		exmap_transfer_add_page(transfer, page);
	}
	/* Nothing is written of a range that is not there as a whole. */
	while (result->error && batch->transfers.prev != before) {
		transfer = list_last_entry(&batch->transfers, struct exmap_transfer, node);
		exmap_transfer_let_go(transfer);
		exmap_transfer_remove(transfer);
	}
}

void exmap_transfer_plan(struct exmap_transfer_batch *batch, struct exmap *exmap,
			 unsigned int index, enum exmap_transfer_kind kind,
			 const struct exmap_range *ranges, struct exmap_result *results,
			 unsigned int count)
{
	unsigned int i;

	exmap_batch_begin(batch, exmap, index);
	memset(results, 0, count * sizeof(*results));
	for (i = 0; i < count; i++) {
		if (kind == TRANSFER_WRITE)
			exmap_batch_write(batch, ranges[i], &results[i]);
		else
			exmap_batch_fill(batch, ranges[i], kind == TRANSFER_REFRESH, &results[i]);
	}
}

unsigned int exmap_transfer_plan_new(struct exmap_transfer_batch *batch, struct exmap *exmap,
				     unsigned int index, const struct exmap_range *ranges,
				     struct exmap_result *results, unsigned int count)
{
	unsigned int i;

	exmap_batch_begin(batch, exmap, index);
	for (i = 0; i < count; i++) {
		results[i] = (struct exmap_result){};
		exmap_batch_fill(batch, ranges[i], false, &results[i]);
		if (batch->has_gap || results[i].error)
			return i + 1;
	}
	return count;
}

static void exmap_batch_put(struct exmap_transfer_batch *batch)
{
	if (!atomic_dec_and_test(&batch->left))
		return;
	if (batch->finished)
		batch->finished(batch);
	else if (cmpxchg(&batch->state, BATCH_WAITED_FOR, BATCH_DONE) == BATCH_ABANDONED)
		queue_work(batch->exmap->work, &batch->work);
	else
		complete(&batch->done);
}

static void exmap_transfer_end(struct exmap_transfer *transfer, long outcome)
{
	transfer->outcome = outcome;
	trace_exmap_transfer(transfer->batch->index, transfer->page, transfer->count, outcome);
	exmap_batch_put(transfer->batch);
}

static void exmap_transfer_completed(struct kiocb *kiocb, long outcome)
{
	struct exmap_transfer *transfer = container_of(kiocb, struct exmap_transfer, kiocb);

	if (transfer->kind == TRANSFER_WRITE)
		kiocb_end_write(kiocb);
	exmap_transfer_end(transfer, outcome);
}

static void exmap_transfer_submit(struct exmap_transfer *transfer, struct file *file, bool waits)
{
	struct kiocb *kiocb = &transfer->kiocb;
	bool write = transfer->kind == TRANSFER_WRITE;
	struct iov_iter iter;
	long outcome;

	init_sync_kiocb(kiocb, file);
	kiocb->ki_pos = transfer->page << PAGE_SHIFT;
	kiocb->ki_complete = waits ? NULL : exmap_transfer_completed;
	iov_iter_bvec(&iter, write ? WRITE : READ, transfer->pages, transfer->count,
		      (size_t)transfer->count << PAGE_SHIFT);
	if (write)
		kiocb->ki_flags |= IOCB_WRITE;
	outcome = write ? vellum_iocb_write(file, kiocb, &iter) :
			  vfs_iocb_iter_read(file, kiocb, &iter);
	if (outcome != -EIOCBQUEUED)
		exmap_transfer_end(transfer, outcome);
}

static struct exmap_transfer *exmap_batch_first(struct exmap_transfer_batch *batch)
{
	return list_first_entry_or_null(&batch->transfers, struct exmap_transfer, node);
}

/*
 * Whether a caller that waits for one transfer may wait inside the call, which is the cheapest
 * wait. For a block device it may: the wait ends when the device answers, or the device is given
 * up.
 */
static bool exmap_may_wait_inside(const struct exmap *exmap)
{
	return S_ISBLK(file_inode(exmap->backing)->i_mode);
}

static void exmap_batch_submit(struct exmap_transfer_batch *batch)
{
	struct file *file = batch->exmap->backing;
	struct exmap_transfer *transfer;
	struct blk_plug plug;

	/* Other threads may take the lane's frames meanwhile. */
	frame_take_end(&batch->exmap->pool, &batch->exmap->pool.lanes[batch->index],
		       &batch->bundle);
	if (!batch->finished && list_is_singular(&batch->transfers) &&
	    exmap_may_wait_inside(batch->exmap) && exmap_batch_first(batch)->count) {
		atomic_inc(&batch->left);
		exmap_transfer_submit(exmap_batch_first(batch), file, true);
	} else {
		blk_start_plug(&plug);
		list_for_each_entry(transfer, &batch->transfers, node) {
			if (!transfer->count)
				continue;
			atomic_inc(&batch->left);
			exmap_transfer_submit(transfer, file, false);
		}
		blk_finish_plug(&plug);
	}
	/* The batch may be gone after this. */
	exmap_batch_put(batch);
}

/*
 * Brings the pages that were read to the surface. The frames of pages that were not read, or came
 * too late, go back to the pool.
 */
static unsigned int exmap_transfer_publish(struct exmap_transfer_batch *batch,
					   struct exmap_transfer *transfer, unsigned int good)
{
	struct exmap *exmap = batch->exmap;
	struct frame_lane *lane = &exmap->pool.lanes[batch->index];
	unsigned int i, published = 0;

	for (i = 0; i < transfer->count; i++) {
		u64 frame = page_to_pfn(transfer->pages[i].bv_page);
		u64 page = transfer->page + i;
		bool placed = false, is_huge = true;
		/* Meanwhile the table of the page may have been empty and pruned. */
		pteval_t *leaf = i < good ? exmap_make_leaf(exmap, page, &is_huge) : NULL;

		if (!leaf && !is_huge && !transfer->result->error)
			transfer->result->error = -ENOMEM;
		/* Meanwhile a leaf of 2 MiB may have come to map the page. */
		while (!placed && leaf && !exmap_has_frame(exmap, READ_ONCE(*leaf))) {
			if (!exmap_wait(exmap, leaf, page))
				break;
			placed = exmap_place(exmap, leaf, page, frame, &batch->zeros);
		}
		if (placed) {
			published++;
			continue;
		}
		exmap_found(exmap, &batch->zeros);
		batch->has_gap |= i < good;
		frame_take_back(&exmap->pool, lane, &batch->bundle, frame);
		lane->given++;
	}
	return published;
}

static void exmap_transfer_conclude_one(struct exmap_transfer_batch *batch,
					struct exmap_transfer *transfer)
{
	struct exmap_interface *interface = &batch->exmap->interface[batch->index];
	unsigned int good = transfer->outcome < 0 ? 0 : transfer->outcome >> PAGE_SHIFT;
	struct exmap_result *result = transfer->result;

	batch->has_gap |= good && batch->short_one == result;
	if (good < transfer->count) {
		batch->short_one = result;
		if (!result->error)
			result->error = transfer->outcome < 0 ? transfer->outcome :
					transfer->kind == TRANSFER_WRITE ? -EIO : -ENODATA;
	}
	if (transfer->kind == TRANSFER_FILL)
		good = exmap_transfer_publish(batch, transfer, good);
	else
		exmap_transfer_let_go(transfer);
	result->pages += good;
	if (transfer->kind == TRANSFER_WRITE)
		interface->written += good;
	else
		interface->read += good;
}

static void exmap_batch_forget(struct exmap_transfer_batch *batch)
{
	struct exmap_transfer *transfer, *next;

	list_for_each_entry_safe(transfer, next, &batch->transfers, node)
		exmap_transfer_remove(transfer);
	if (batch->holds)
		atomic_dec(&batch->exmap->pool.holders);
}

/* Concludes the transfers that have an outcome. The interface's lock is held. */
void exmap_transfer_conclude(struct exmap_transfer_batch *batch, struct mm_struct *mm)
{
	struct exmap *exmap = batch->exmap;
	struct frame_lane *lane = &exmap->pool.lanes[batch->index];
	struct exmap_transfer *transfer;

	frame_take_begin(&exmap->pool, lane, &batch->bundle, 0);
	list_for_each_entry(transfer, &batch->transfers, node)
		exmap_transfer_conclude_one(batch, transfer);
	frame_take_end(&exmap->pool, lane, &batch->bundle);
	if (batch->zeros)
		exmap_flush_zeros(exmap, &exmap->interface[batch->index], mm, batch->zeros);
	exmap_batch_forget(batch);
}

/*
 * Concludes a batch in which all went well and no other thread interfered. This changes entries of
 * page tables, and nothing else. False: something is left to do.
 */
bool exmap_transfer_conclude_quickly(struct exmap_transfer_batch *batch)
{
	struct exmap *exmap = batch->exmap;
	struct exmap_transfer *transfer = exmap_batch_first(batch);
	unsigned int i, zeros = 0;	/* stays 0: no page shows zeros */

	if (!transfer || !list_is_singular(&batch->transfers) || exmap->zero_leaf ||
	    exmap->flags & VELLUM_EXMAP_LOCK_TABLES ||
	    transfer->kind != TRANSFER_FILL || transfer->result->error ||
	    transfer->outcome != (long)transfer->count << PAGE_SHIFT ||
	    transfer->page + transfer->count > exmap->mount.tail)
		return false;
	/* No interface's lock is held here. RCU keeps tables that are pruned meanwhile. */
	rcu_read_lock();
	for (i = 0; i < transfer->count; i++) {
		u64 page = transfer->page + i;
		pteval_t *leaf = pt_tree_leaf(&exmap->tree, page);

		if (!leaf || !exmap_place(exmap, leaf, page,
					  page_to_pfn(transfer->pages[i].bv_page), &zeros))
			break;
	}
	rcu_read_unlock();
	transfer->result->pages += i;
	/* A caller that waits holds the interface's lock. */
	if (batch->finished)
		atomic64_add(i, &exmap->read_quickly);
	else
		exmap->interface[batch->index].read += i;
	if (i < transfer->count) {
		/* The rest begins with the page that another thread has brought. */
		transfer->page += i;
		transfer->count -= i;
		transfer->outcome -= (long)i << PAGE_SHIFT;
		memmove(transfer->pages, transfer->pages + i,
			transfer->count * sizeof(*transfer->pages));
		return false;
	}
	exmap_batch_forget(batch);
	return true;
}

void exmap_transfer_start(struct exmap_transfer_batch *batch,
			  void (*finished)(struct exmap_transfer_batch *))
{
	batch->finished = finished;
	exmap_batch_submit(batch);
}

/* The last step. After it the exmap's own queue and the module may go. */
static void exmap_batch_end_abandoned(struct work_struct *work)
{
	struct exmap_transfer_batch *batch = container_of(work, struct exmap_transfer_batch, work);

	exmap_put(batch->exmap);
	kfree(batch);
	/* The module waits for its queue, and so for this function to return. */
	module_put(THIS_MODULE);
}

static void exmap_batch_conclude_abandoned(struct work_struct *work)
{
	struct exmap_transfer_batch *batch = container_of(work, struct exmap_transfer_batch, work);
	struct exmap_interface *interface = &batch->exmap->interface[batch->index];

	/* The end of the last transfer may still be about to signal the completion. */
	if (batch->state == BATCH_DONE)
		wait_for_completion(&batch->done);
	mutex_lock(&interface->lock);
	exmap_transfer_conclude(batch, batch->mm);
	mutex_unlock(&interface->lock);
	if (batch->mm)
		mmdrop(batch->mm);
	INIT_WORK(&batch->work, exmap_batch_end_abandoned);
	queue_work(exmap_work, &batch->work);
}

/* Abandons the batch: the caller is to die, and the transfers go on without it. */
static void exmap_batch_abandon(struct exmap_transfer_batch *batch)
{
	struct exmap *exmap = batch->exmap;
	struct exmap_transfer *transfer;

	/* No caller reads the results. Only the code that concludes the batch does. */
	batch->nowhere = (struct exmap_result){};
	list_for_each_entry(transfer, &batch->transfers, node)
		transfer->result = &batch->nowhere;
	exmap->interface[batch->index].batch = NULL;
	batch->mm = exmap->zero_leaf ? current->mm : NULL;
	if (batch->mm)
		mmgrab(batch->mm);
	kref_get(&exmap->references);
	__module_get(THIS_MODULE);
	INIT_WORK(&batch->work, exmap_batch_conclude_abandoned);
	/* The end of the last transfer queues the work, unless it has just come. */
	if (cmpxchg(&batch->state, BATCH_WAITED_FOR, BATCH_ABANDONED) == BATCH_DONE)
		queue_work(exmap->work, &batch->work);
}

/* wait_for_completion_io() that can be killed. */
static int exmap_wait_killable(struct completion *done)
{
	bool before = current->in_iowait;
	int error;

	current->in_iowait = true;
	error = wait_for_completion_killable(done);
	current->in_iowait = before;
	return error;
}

int exmap_transfer_finish(struct exmap_transfer_batch *batch)
{
	exmap_batch_submit(batch);
	if (!try_wait_for_completion(&batch->done) && exmap_wait_killable(&batch->done)) {
		exmap_batch_abandon(batch);
		return -EINTR;
	}
	if (!exmap_transfer_conclude_quickly(batch))
		exmap_transfer_conclude(batch, current->mm);
	return 0;
}

static long exmap_read_frame(struct exmap *exmap, const struct kiocb *caller, u64 page, u64 frame)
{
	struct bio_vec bytes = { .bv_page = pfn_to_page(frame), .bv_len = PAGE_SIZE };
	struct file *file = exmap->backing;
	struct kiocb kiocb = {
		.ki_filp = file,
		.ki_flags = file->f_iocb_flags,
		.ki_ioprio = caller->ki_ioprio,
		.ki_pos = page << PAGE_SHIFT,
	};
	struct iov_iter iter;
	long outcome;

	iov_iter_bvec(&iter, READ, &bytes, 1, PAGE_SIZE);
	outcome = vfs_iocb_iter_read(file, &kiocb, &iter);
	if (likely(outcome == PAGE_SIZE))
		return outcome;
	return outcome < 0 ? outcome : -ENODATA;
}

ssize_t exmap_transfer_read_page(struct exmap *exmap, unsigned int index,
				 const struct kiocb *caller, u64 page)
{
	struct exmap_interface *interface = &exmap->interface[index];
	struct frame_lane *lane = &exmap->pool.lanes[index];
	/* The table stays: tables are pruned only with the interface locked. */
	pteval_t *leaf = pt_tree_leaf(&exmap->tree, page);
	unsigned int zeros = 0;
	bool placed = false;
	long outcome;
	u64 frame;

	if (unlikely(!leaf || !exmap_may_wait_inside(exmap)))
		return -EAGAIN;
	if (unlikely(READ_ONCE(*leaf))) {
		if (!exmap_has_frame(exmap, READ_ONCE(*leaf)))
			return -EAGAIN;
		exmap_found(exmap, &zeros);
		if (unlikely(zeros))
			exmap_flush_zeros(exmap, interface, current->mm, zeros);
		return 0;
	}
	frame = frame_take_one(&exmap->pool, lane);
	if (unlikely(!frame))
		return -ENOMEM;
	lane->taken++;
	outcome = exmap_read_frame(exmap, caller, page, frame);
	trace_exmap_transfer(index, page, 1, outcome);
	while (likely(outcome > 0) && !placed && !exmap_has_frame(exmap, READ_ONCE(*leaf))) {
		if (unlikely(READ_ONCE(*leaf)) && !exmap_wait(exmap, leaf, page))
			break;
		placed = exmap_place(exmap, leaf, page, frame, &zeros);
	}
	if (unlikely(!placed))
		exmap_found(exmap, &zeros);
	if (unlikely(zeros))
		exmap_flush_zeros(exmap, interface, current->mm, zeros);
	if (unlikely(!placed)) {
		frame_take_back_one(&exmap->pool, lane, frame);
		lane->given++;
		return outcome < 0 ? outcome : 0;
	}
	interface->read++;
	return PAGE_SIZE;
}
