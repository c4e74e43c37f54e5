// SPDX-License-Identifier: GPL-2.0
/*
 * Reads pages from a file. The file's own read operation reads into the pages themselves, so direct
 * I/O goes straight there, several pieces at a time.
 *
 * The caller may be killed while pieces are under way: a file system that waits for a server (FUSE,
 * NFS) may never give an answer. The pieces go on without the caller, and the last one to end
 * cleans up. A wait inside the file system's own read_iter is the file system's. A cached file is
 * read there.
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

/* A piece has 1 MiB, and so many pieces are under way at a time. */
#define MORSEL_PIECE_PAGES	256
#define MORSEL_PIECES		8

struct morsel_piece {
	struct kiocb		kiocb;
	struct morsel_filling		*filling;
	loff_t			from;
	struct completion	done;
	ssize_t			outcome;
	size_t			length;		/* bytes; 0: nothing is under way */
	unsigned int		pages;
	struct bio_vec		vector[MORSEL_PIECE_PAGES];
};

struct morsel_filling {
	struct morsel	*morsel;
	struct file	*source;
	loff_t		from;		/* where the next piece begins in the source */
	u64		page;		/* and in the Morsel */
	u64		left;		/* bytes still to read */
	u64		filled;		/* bytes that came without a gap */
	int		error;		/* the first error, by place in the file */
	bool		ended;		/* no more pieces begin */
	bool		has_gap;	/* no more bytes are counted */
	struct morsel_piece	*pieces[MORSEL_PIECES];
	/* Pieces under way, and one more until the caller was killed. */
	atomic_t	users;
	bool		abandoned;	/* the caller was killed */
	struct file	*file;		/* the Morsel's file, once abandoned */
	struct work_struct work;
};

static struct workqueue_struct *morsel_fill_work;

static void morsel_piece_complete(struct kiocb *kiocb, long outcome)
{
	struct morsel_piece *piece = container_of(kiocb, struct morsel_piece, kiocb);
	struct morsel_filling *filling = piece->filling;
	/* Decremented before the caller may free the filling. */
	bool is_last = atomic_dec_and_test(&filling->users);

	piece->outcome = outcome;
	complete(&piece->done);
	if (is_last)
		queue_work(morsel_fill_work, &filling->work);
}

static void morsel_piece_release_pages(struct morsel_piece *piece)
{
	while (piece->pages)
		put_page(piece->vector[--piece->pages].bv_page);
	piece->length = 0;
}

/* Gets the page with a reference. Another thread may take the page off before this one has it. */
static struct page *morsel_page_for(struct morsel *morsel, u64 number)
{
	struct page *page;
	int error;

	do {
		error = morsel_populate(morsel, number);
		page = error ? ERR_PTR(error) : morsel_get_page(morsel, number);
	} while (!page && !fatal_signal_pending(current));
	return page ?: ERR_PTR(-EINTR);
}

static int morsel_piece_collect_pages(struct morsel_filling *filling, struct morsel_piece *piece)
{
	size_t length = min_t(u64, filling->left, MORSEL_PIECE_PAGES * PAGE_SIZE);
	struct page *page;
	size_t part;

	for (piece->pages = 0; length; length -= part) {
		part = min_t(size_t, length, PAGE_SIZE);
		page = morsel_page_for(filling->morsel, filling->page + piece->pages);
		if (IS_ERR(page)) {
			morsel_piece_release_pages(piece);
			return PTR_ERR(page);
		}
		piece->vector[piece->pages++] = (struct bio_vec){ .bv_page = page, .bv_len = part };
		piece->length += part;
	}
	return 0;
}

static void morsel_piece_begin(struct morsel_filling *filling, struct morsel_piece *piece)
{
	struct iov_iter iter;
	ssize_t outcome;
	int error = signal_pending(current) ? -EINTR : morsel_piece_collect_pages(filling, piece);

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
	piece->kiocb.ki_complete = morsel_piece_complete;
	reinit_completion(&piece->done);
	iov_iter_bvec(&iter, READ, piece->vector, piece->pages, piece->length);
	atomic_inc(&filling->users);
	outcome = vfs_iocb_iter_read(filling->source, &piece->kiocb, &iter);
	if (outcome != -EIOCBQUEUED)
		morsel_piece_complete(&piece->kiocb, outcome);
}

/* Reads what the file has and did not give at once. */
static ssize_t morsel_piece_read_rest(struct morsel_filling *filling, struct morsel_piece *piece,
				      size_t done)
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

/* Waits for the piece, if it is under way. Counts its bytes, if all pieces before it were whole. */
static void morsel_piece_end(struct morsel_filling *filling, struct morsel_piece *piece)
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
		outcome = done < piece->length ? morsel_piece_read_rest(filling, piece, done) : 0;
	}
	if (!filling->has_gap && done < piece->length) {
		/* This error comes before the one that kept later pieces from beginning. */
		filling->error = outcome;
		filling->has_gap = true;
		filling->ended = true;
	}
	filling->filled += done;
	morsel_piece_release_pages(piece);
}

static void morsel_fill_by_pieces(struct morsel_filling *filling)
{
	unsigned int next = 0, i;

	while (filling->left && !filling->ended) {
		morsel_piece_end(filling, filling->pieces[next]);
		if (!filling->ended)
			morsel_piece_begin(filling, filling->pieces[next]);
		next = (next + 1) % MORSEL_PIECES;
		cond_resched();
	}
	for (i = 0; i < MORSEL_PIECES; i++)
		morsel_piece_end(filling, filling->pieces[(next + i) % MORSEL_PIECES]);
}

static int morsel_make_pieces(struct morsel_filling *filling)
{
	struct morsel_piece *piece;
	unsigned int i;

	for (i = 0; i < MORSEL_PIECES; i++) {
		piece = kvzalloc(sizeof(*piece), GFP_KERNEL_ACCOUNT);
		if (!piece)
			return -ENOMEM;
		init_completion(&piece->done);
		piece->filling = filling;
		filling->pieces[i] = piece;
	}
	return 0;
}

static bool morsel_fill_is_within(const struct morsel *morsel,
				  const struct vellum_morsel_fill *fill)
{
	/* Direct I/O reads whole blocks, so the last page may be filled to its end. */
	u64 end = morsel_page_count(morsel) << PAGE_SHIFT;

	return IS_ALIGNED(fill->offset, PAGE_SIZE) && fill->length && fill->offset < end &&
	       fill->length <= end - fill->offset && fill->from <= S64_MAX - fill->length;
}

static void morsel_free_pieces(struct morsel_filling *filling)
{
	unsigned int i;

	for (i = 0; i < MORSEL_PIECES; i++)
		kvfree(filling->pieces[i]);
}

/* Cleans up after the last piece has ended. The caller has died before. */
static void morsel_fill_end_abandoned(struct work_struct *work)
{
	struct morsel_filling *filling = container_of(work, struct morsel_filling, work);
	unsigned int i;

	for (i = 0; i < MORSEL_PIECES; i++) {
		if (!filling->pieces[i]->length)
			continue;
		/* The function that completes the piece may still be running. */
		wait_for_completion(&filling->pieces[i]->done);
		morsel_piece_release_pages(filling->pieces[i]);
	}
	morsel_free_pieces(filling);
	morsel_end_writing(filling->morsel);
	fput(filling->source);
	fput(filling->file);
	kfree(filling);
}

static void morsel_fill_abandon(struct morsel_filling *filling, struct file *file)
{
	/* The reference keeps the Morsel, the mount and the module. */
	filling->file = get_file(file);
	INIT_WORK(&filling->work, morsel_fill_end_abandoned);
	if (atomic_dec_and_test(&filling->users))
		queue_work(morsel_fill_work, &filling->work);
}

static int morsel_fill_from(struct morsel_filling *filling)
{
	u64 size = i_size_read(filling->source->f_mapping->host);
	int error;

	if (filling->from >= size)
		return -ENODATA;
	/* Pages beyond the source's end are not populated. Direct I/O asks for whole blocks. */
	filling->left = min(filling->left, round_up(size, PAGE_SIZE) - filling->from);
	error = morsel_begin_writing(filling->morsel);
	if (error)
		return error;
	error = morsel_make_pieces(filling);
	if (!error) {
		morsel_fill_by_pieces(filling);
		error = filling->error;
	}
	if (filling->abandoned)
		return -EINTR;
	morsel_free_pieces(filling);
	morsel_end_writing(filling->morsel);
	return error;
}

static int morsel_fill_from_source(struct morsel_filling *filling, struct vellum_morsel_fill *fill)
{
	int error;

	filling->source = fget(fill->source);
	if (!filling->source)
		return -EBADF;
	if (!(filling->source->f_mode & FMODE_READ))
		error = -EBADF;
	else
		error = vellum_file_has_storage(filling->source) ? morsel_fill_from(filling) :
			-EINVAL;
	if (!filling->abandoned)
		fput(filling->source);
	fill->filled = filling->filled;
	/* Bytes that came before a signal are reported. */
	return error == -EINTR && filling->filled ? 0 : error;
}

int morsel_fill(struct file *file, struct vellum_morsel_fill *fill)
{
	struct morsel *morsel = morsel_of(file_inode(file));
	struct morsel_filling *filling;
	int error;

	if (!morsel_fill_is_within(morsel, fill))
		return -EINVAL;
	filling = kzalloc(sizeof(*filling), GFP_KERNEL_ACCOUNT);
	if (!filling)
		return -ENOMEM;
	filling->morsel = morsel;
	filling->from = fill->from;
	filling->page = fill->offset >> PAGE_SHIFT;
	filling->left = fill->length;
	atomic_set(&filling->users, 1);
	error = morsel_fill_from_source(filling, fill);
	if (filling->abandoned)
		morsel_fill_abandon(filling, file);
	else
		kfree(filling);
	return error;
}

int morsel_fill_init(void)
{
	morsel_fill_work = alloc_workqueue("morsel", WQ_UNBOUND, 0);
	return morsel_fill_work ? 0 : -ENOMEM;
}

void morsel_fill_exit(void)
{
	destroy_workqueue(morsel_fill_work);
}
