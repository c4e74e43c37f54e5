// SPDX-License-Identifier: GPL-2.0
/*
 * Pages are read from a file: by its own read operation into the pages themselves, so that direct
 * I/O goes straight there, several pieces at a time.
 *
 * The caller may be killed while pieces are under way: a file system that waits for a server (FUSE,
 * NFS) may never give an answer. They go on without the caller, and the last to end cleans up. A
 * wait inside the file system's own read_iter is the file system's: that is where a cached file is
 * read.
 */

#include <linux/bvec.h>
#include <linux/completion.h>
#include <linux/file.h>
#include <linux/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/uio.h>
#include <linux/workqueue.h>

#include "core/storage.h"
#include "morsel/morsel.h"

/* 1 MiB, and so many of them at a time. */
#define PIECE_PAGES	256
#define PIECES		8

struct piece {
	struct kiocb		kiocb;
	struct filling		*filling;
	loff_t			from;
	struct completion	done;
	ssize_t			outcome;
	size_t			length;		/* bytes; 0: nothing is under way */
	unsigned int		pages;
	struct bio_vec		vector[PIECE_PAGES];
};

struct filling {
	struct morsel	*morsel;
	struct file	*source;
	loff_t		from;		/* where the next piece begins in the source */
	u64		page;		/* and in the Morsel */
	u64		left;		/* bytes */
	u64		filled;		/* without a gap */
	int		error;		/* the first, by place */
	bool		ended;		/* nothing more is to be begun */
	bool		has_gap;	/* nothing more is to be counted */
	struct piece	*pieces[PIECES];
	/* Pieces under way, and one more until the caller was killed. */
	atomic_t	users;
	bool		abandoned;	/* the caller was killed */
	struct file	*file;		/* the Morsel's, once abandoned */
	struct work_struct work;
};

static struct workqueue_struct *abandoned_fills;

static void complete_piece(struct kiocb *kiocb, long outcome)
{
	struct piece *piece = container_of(kiocb, struct piece, kiocb);
	struct filling *filling = piece->filling;
	/* Before the caller may free it. */
	bool is_last = atomic_dec_and_test(&filling->users);

	piece->outcome = outcome;
	complete(&piece->done);
	if (is_last)
		queue_work(abandoned_fills, &filling->work);
}

static void release_pages_of(struct piece *piece)
{
	while (piece->pages)
		put_page(piece->vector[--piece->pages].bv_page);
	piece->length = 0;
}

/* Somebody may take the page off again before we have it. */
static struct page *page_for(struct morsel *morsel, u64 number)
{
	struct page *page;
	int error;

	do {
		error = morsel_populate(morsel, number);
		page = error ? ERR_PTR(error) : morsel_get_page(morsel, number);
	} while (!page && !fatal_signal_pending(current));
	return page ?: ERR_PTR(-EINTR);
}

static int collect_pages(struct filling *filling, struct piece *piece)
{
	size_t length = min_t(u64, filling->left, PIECE_PAGES * PAGE_SIZE);
	struct page *page;
	size_t part;

	for (piece->pages = 0; length; length -= part) {
		part = min_t(size_t, length, PAGE_SIZE);
		page = page_for(filling->morsel, filling->page + piece->pages);
		if (IS_ERR(page)) {
			release_pages_of(piece);
			return PTR_ERR(page);
		}
		piece->vector[piece->pages++] = (struct bio_vec){ .bv_page = page, .bv_len = part };
		piece->length += part;
	}
	return 0;
}

static void begin_piece(struct filling *filling, struct piece *piece)
{
	struct iov_iter iter;
	ssize_t outcome;
	int error = signal_pending(current) ? -EINTR : collect_pages(filling, piece);

	if (error) {
		filling->error = error;
		filling->ended = true;
		return;
	}
	piece->from = filling->from;
	filling->from += piece->length;
	filling->page += piece->pages;
	filling->left -= piece->length;

	init_sync_kiocb(&piece->kiocb, filling->source);
	piece->kiocb.ki_pos = piece->from;
	piece->kiocb.ki_complete = complete_piece;
	reinit_completion(&piece->done);
	iov_iter_bvec(&iter, READ, piece->vector, piece->pages, piece->length);
	atomic_inc(&filling->users);
	outcome = vfs_iocb_iter_read(filling->source, &piece->kiocb, &iter);
	if (outcome != -EIOCBQUEUED)
		complete_piece(&piece->kiocb, outcome);
}

/* What a file did not give at once, though it has it. */
static ssize_t read_rest(struct filling *filling, struct piece *piece, size_t done)
{
	struct iov_iter iter;

	if (piece->from + done >= i_size_read(filling->source->f_mapping->host))
		return 0;
	init_sync_kiocb(&piece->kiocb, filling->source);
	piece->kiocb.ki_pos = piece->from + done;
	iov_iter_bvec(&iter, READ, piece->vector, piece->pages, piece->length);
	iov_iter_advance(&iter, done);
	return vfs_iocb_iter_read(filling->source, &piece->kiocb, &iter);
}

/* Waits for the piece, if it is under way. Counts it, if all before it were whole. */
static void end_piece(struct filling *filling, struct piece *piece)
{
	ssize_t outcome;
	size_t done = 0;

	if (!piece->length || filling->abandoned)
		return;
	if (wait_for_completion_killable(&piece->done)) {
		filling->abandoned = true;
		filling->ended = true;
		return;
	}
	outcome = piece->outcome;
	while (!filling->has_gap && outcome > 0) {
		done += outcome;
		outcome = done < piece->length ? read_rest(filling, piece, done) : 0;
	}
	if (!filling->has_gap && done < piece->length) {
		/* Before what kept the next ones from being begun. */
		filling->error = outcome;
		filling->has_gap = true;
		filling->ended = true;
	}
	filling->filled += done;
	release_pages_of(piece);
}

static void fill(struct filling *filling)
{
	unsigned int next = 0, i;

	while (filling->left && !filling->ended) {
		end_piece(filling, filling->pieces[next]);
		if (!filling->ended)
			begin_piece(filling, filling->pieces[next]);
		next = (next + 1) % PIECES;
		cond_resched();
	}
	for (i = 0; i < PIECES; i++)
		end_piece(filling, filling->pieces[(next + i) % PIECES]);
}

static int make_pieces(struct filling *filling)
{
	struct piece *piece;
	unsigned int i;

	for (i = 0; i < PIECES; i++) {
		piece = kvzalloc(sizeof(*piece), GFP_KERNEL_ACCOUNT);
		if (!piece)
			return -ENOMEM;
		init_completion(&piece->done);
		piece->filling = filling;
		filling->pieces[i] = piece;
	}
	return 0;
}

static bool is_within(const struct morsel *morsel, const struct vellum_morsel_fill *fill)
{
	/* Direct I/O reads whole blocks: the last page may be filled to its end. */
	u64 end = morsel_page_count(morsel) << PAGE_SHIFT;

	return IS_ALIGNED(fill->offset, PAGE_SIZE) && fill->length && fill->offset < end &&
	       fill->length <= end - fill->offset && fill->from <= S64_MAX - fill->length;
}

static void free_pieces(struct filling *filling)
{
	unsigned int i;

	for (i = 0; i < PIECES; i++)
		kvfree(filling->pieces[i]);
}

/* The last piece has ended, and so has the caller. */
static void end_abandoned(struct work_struct *work)
{
	struct filling *filling = container_of(work, struct filling, work);
	unsigned int i;

	for (i = 0; i < PIECES; i++) {
		if (!filling->pieces[i]->length)
			continue;
		/* What completes them may not have come to its end. */
		wait_for_completion(&filling->pieces[i]->done);
		release_pages_of(filling->pieces[i]);
	}
	free_pieces(filling);
	morsel_end_writing(filling->morsel);
	fput(filling->source);
	fput(filling->file);
	kfree(filling);
}

static void abandon(struct filling *filling, struct file *file)
{
	/* It keeps the Morsel, the mount and the module. */
	filling->file = get_file(file);
	INIT_WORK(&filling->work, end_abandoned);
	if (atomic_dec_and_test(&filling->users))
		queue_work(abandoned_fills, &filling->work);
}

static int fill_from(struct filling *filling)
{
	u64 size = i_size_read(filling->source->f_mapping->host);
	int error;

	if (filling->from >= size)
		return -ENODATA;
	/* Nothing is populated for what is not there; direct I/O asks for whole blocks. */
	filling->left = min(filling->left, round_up(size, PAGE_SIZE) - filling->from);
	error = morsel_begin_writing(filling->morsel);
	if (error)
		return error;
	error = make_pieces(filling);
	if (!error) {
		fill(filling);
		error = filling->error;
	}
	if (filling->abandoned)
		return -EINTR;
	free_pieces(filling);
	morsel_end_writing(filling->morsel);
	return error;
}

static int fill_filling(struct filling *filling, struct vellum_morsel_fill *fill)
{
	int error;

	filling->source = fget(fill->source);
	if (!filling->source)
		return -EBADF;
	if (!(filling->source->f_mode & FMODE_READ))
		error = -EBADF;
	else
		error = file_has_storage(filling->source) ? fill_from(filling) : -EINVAL;
	if (!filling->abandoned)
		fput(filling->source);
	fill->filled = filling->filled;
	/* What came before a signal is worth knowing. */
	return error == -EINTR && filling->filled ? 0 : error;
}

int morsel_fill(struct file *file, struct vellum_morsel_fill *fill)
{
	struct morsel *morsel = morsel_of(file_inode(file));
	struct filling *filling;
	int error;

	if (!is_within(morsel, fill))
		return -EINVAL;
	filling = kzalloc(sizeof(*filling), GFP_KERNEL_ACCOUNT);
	if (!filling)
		return -ENOMEM;
	filling->morsel = morsel;
	filling->from = fill->from;
	filling->page = fill->offset >> PAGE_SHIFT;
	filling->left = fill->length;
	atomic_set(&filling->users, 1);
	error = fill_filling(filling, fill);
	if (filling->abandoned)
		abandon(filling, file);
	else
		kfree(filling);
	return error;
}

int morsel_fill_init(void)
{
	abandoned_fills = alloc_workqueue("morsel", WQ_UNBOUND, 0);
	return abandoned_fills ? 0 : -ENOMEM;
}

void morsel_fill_exit(void)
{
	destroy_workqueue(abandoned_fills);
}
